"""`python benchmark.py …` is `whiflash bench …`; `torchrun --nproc-per-node N benchmark.py …` shares its prompts."""

import sys

try:
    from whiflash.cli import main
except ModuleNotFoundError as error:
    sys.exit(
        f"{sys.executable} has no module {error.name}; install the project (pip install -e '.[bench,demo]'), or use "
        "the environment that make set up: .venv/bin/python benchmark.py"
    )

if __name__ == "__main__":
    sys.argv.insert(1, "bench")
    main()
