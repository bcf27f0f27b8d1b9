"""`python -m shardwise`, which is also what torchrun starts: `torchrun ... -m shardwise train`."""

from shardwise.cli.main import main

if __name__ == "__main__":
    main()
