"""`python -m proxprop.lab` is the command `proxprop`."""

from proxprop_cli import main

if __name__ == "__main__":
    main()
