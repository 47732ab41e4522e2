"""The generic Python language component: runs an author's source in the sandbox. Nothing here is an author's API."""
