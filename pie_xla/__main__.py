"""`python -m pie_xla` is the `pie-xla` command."""

from pie_xla.cli.main import main

if __name__ == "__main__":
    main()
