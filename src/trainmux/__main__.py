"""``python -m trainmux`` is the same as the command ``trainmux``."""

from trainmux.cli.main import main

if __name__ == "__main__":
    main()
