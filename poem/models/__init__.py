"""One file per family, named as its checkpoint's `model_type`, in one order: Config, layer, Model, state, weights."""
