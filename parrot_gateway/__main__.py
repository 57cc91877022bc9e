"""`python -m parrot_gateway` is `parrot-gateway`."""

from parrot_gateway.cli import main

if __name__ == "__main__":
    main()
