"""The package's version and the component world it speaks."""

version = "0.1.0"
world = "pie:inferlet@0.1.0"
