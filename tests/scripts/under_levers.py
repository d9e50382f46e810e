"""Run a script in this process with levers engaged from its settled step on: `under_levers.py LEVERS SCRIPT [ARGS]`.

What a run does, without its parent: for tests that compare a whole script's output with plain.
"""

import json
import runpy
import sys

from flatout.frameworks.pytorch.adapter import PyTorch

levers, script = json.loads(sys.argv[1]), sys.argv[2]


class Listener:
    engaged = False

    def on_step(self, step):
        if not self.engaged and framework.settled():
            self.engaged = True
            framework.engage(levers)

    def on_update(self):
        pass

    def on_pass_end(self):
        pass

    def on_failure(self, stage, problem):
        print(f"flatout failed in {stage}: {problem!r}", file=sys.stderr)


framework = PyTorch()
framework.prepare(levers, trial=False)
framework.attach(Listener())
sys.argv = sys.argv[2:]
runpy.run_path(script, run_name="__main__")
