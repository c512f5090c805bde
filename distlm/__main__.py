"""Makes `python -m distlm ...` the same as the `distlm` command."""

from distlm import cli

if __name__ == "__main__":
  cli.main()
