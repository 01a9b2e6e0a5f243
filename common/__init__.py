"""Everything that is the same in every version of the model; the model and its operations live in
the version folders.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
