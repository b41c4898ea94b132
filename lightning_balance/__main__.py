"""`python -m lightning_balance` is the `lightning-balance` command."""

from lightning_balance.cli import main

if __name__ == "__main__":
    main()
