"""Disturbs runs on real processes for a while, and checks that nothing is lost and nothing left.

    python tests/soak/run.py --seconds 1800 --seed 0

Exits with 1 at the first round that fails, and prints how to run that one again and where its files
are.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from soak.rounds import main

if __name__ == "__main__":
    main()
