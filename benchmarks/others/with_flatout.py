"""The same script under `--levers input`; a setting is the number of workers that the script asks for."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from contract import main
from with_plain import MAKERS

from engaged import Engaged

if __name__ == "__main__":
    from flatout.frameworks.pytorch.levers import registry
    from flatout.machine.read import read_machine
    from flatout.run.choice import parse_levers

    engaged = Engaged(parse_levers(("input",), registry(), read_machine))
    main("flatout", MAKERS, evidence=engaged.evidence)
