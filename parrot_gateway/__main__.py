"""`python -m parrot_gateway` is `parrot-gateway`."""

from parrot_gateway.cli.main import main

if __name__ == "__main__":
    main()
