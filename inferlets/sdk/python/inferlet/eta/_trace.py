def current():
    return None
