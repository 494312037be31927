"""`python -m eyas`: the command line where the script is not on the path."""

from eyas.cli.main import main

if __name__ == "__main__":
    main()
