"""A stand-in for the SDK with just the host transport, so that the sandbox is tested alone."""
