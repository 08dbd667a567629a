"""`python benchmark.py …` is `whiflash bench …`; `torchrun --nproc-per-node N benchmark.py …` shares its prompts."""

import sys

from whiflash.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "bench")
    main()
