"""Memory runs out under a plan: the run goes on, and says which levers take memory."""

import pytest

from faulting import copied, flatout, last_lines, write_plan
from flatout.records.trace import Failure

pytest.importorskip("torch")
from flatout.run.outcome import Outcome


@pytest.mark.smoke
def test_a_run_that_is_short_of_memory_goes_on_and_says_what_took_it(folder):
    copied("faulty.py", folder)
    write_plan("faulty.py", "foreach_optimizer", "bf16")
    done = flatout("run", "faulty.py", "memory")
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert "OutOfMemoryError" in done.stderr and "the levers were released" in done.stderr
    assert "out of memory under levers: `flatout tune --without foreach_optimizer`" in last_lines(done)[-1]


def memory_ran_out(stage):
    return Failure(stage=stage, error="OutOfMemoryError", message="", out_of_memory=True)


@pytest.mark.smoke
def test_memory_that_runs_out_for_the_script_counts_while_levers_are_at_work():
    raised = memory_ran_out("script")
    assert Outcome(raised=raised, engaged=True).out_of_memory
    assert not Outcome(raised=raised, engaged=False).out_of_memory
    assert Outcome(failures=[memory_ran_out("step")]).out_of_memory
    assert not Outcome(failures=[Failure(stage="step", error="ValueError", message="")], engaged=True).out_of_memory
