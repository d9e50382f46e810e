"""Does the queue of pixel work keep its promises in whatever order threads and those who wait get to run?

All interleavings of a small case are explored: actors do what `threads.py` does between two takings of its lock, in
one step each. A promise that a faulty queue breaks has to be found out as well.
"""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cache

import pytest

pytest.importorskip("torch")

from flatout.frameworks.pytorch.input.pixels.queue import Instead, Queue
from tiers import some

BEGIN, FINISH, LEAVE = "begin", "finish", "leave"
"""What one who wants batches does: has one's jobs added, waits for them, or wants it no more."""


def in_turn(numbers):
    """One batch after another."""
    return tuple((what, number) for number in numbers for what in (BEGIN, FINISH))


def ahead(numbers):
    """The next batch is begun before this one is finished."""
    first, *others = numbers
    steps = [(BEGIN, first)]
    for number in others:
        steps += [(BEGIN, number), (FINISH, number - 1)]
    return (*steps, (FINISH, numbers[-1]))


@dataclass(frozen=True)
class Case:
    """What is explored.

    Attributes:
        scripts: What each of those who want batches does.
        num_jobs: Of each batch.
        most_waiting: Jobs.
        most_threads: That there may be.
        may_start: Whether a thread may start, fail to, or either.
        tires: Whether a thread that sleeps may have slept long enough at any time.
        impatient: Whether who waits for jobs may ask again at any time.
        made: The kind of queue.
    """

    scripts: tuple = (in_turn(range(4)),)
    num_jobs: int = 1
    most_waiting: int = 8
    most_threads: int = 2
    may_start: tuple = (True,)
    tires: bool = False
    impatient: bool = False
    made: type = Queue


@dataclass(frozen=True)
class State:
    """The queue, and where everybody stands. Bells have been rung so many times.

    Attributes:
        queue: Its contents.
        threads: For each number: None, or what it is about to do: `("ask", tired)`, `("do", job)`, `("sleep",)`.
        consumers: For each: its place in its script, and what it is about to do there: `("step", job_number)`,
            `("start", thread, then)`, `("do", job, then)`, `("ask",)`, `("sleep",)`.
        bells: For each thread, and each consumer's present wait.
        times_done: Of each job that was done.
        dropped: Jobs that nobody wants.
    """

    queue: tuple
    threads: tuple
    consumers: tuple
    bells: tuple
    times_done: tuple
    dropped: frozenset


def frozen(queue):
    left = frozenset((who, frozenset(jobs)) for who, jobs in queue.left.items())
    return (
        tuple(queue.waiting), frozenset(queue.not_done), frozenset(queue.threads), tuple(queue.asleep), left,
        frozenset(queue.sleepers),
    )  # fmt: skip


def thawed(case, content):
    queue = case.made(case.most_waiting, case.most_threads)
    waiting, not_done, threads, asleep, left, sleepers = content
    queue.waiting.extend(waiting)
    queue.not_done, queue.threads, queue.asleep = set(not_done), set(threads), list(asleep)
    queue.left, queue.sleepers = {who: set(jobs) for who, jobs in left}, set(sleepers)
    return queue


def put(values, place, value):
    return (*values[:place], value, *values[place + 1 :])


def jobs_of(case, number):
    return [number * case.num_jobs + place for place in range(case.num_jobs)]


class World:
    """One state, to be changed into the next."""

    def __init__(self, case, state):
        self.case, self.state = case, state
        self.queue = thawed(case, state.queue)
        self.threads, self.consumers, self.bells = state.threads, state.consumers, state.bells
        self.times_done, self.dropped = Counter(dict(state.times_done)), state.dropped

    def next(self):
        return State(
            frozen(self.queue), self.threads, self.consumers, self.bells, tuple(sorted(self.times_done.items())),
            self.dropped,
        )  # fmt: skip

    def ring(self, who):
        self.bells = put(self.bells, who, self.bells[who] + 1)

    def rung(self, who):
        self.bells = put(self.bells, who, self.bells[who] - 1)

    def did(self, job):
        self.times_done[job] += 1
        for who in self.queue.done(job):
            self.ring(who)


def moves(case, state):
    """All states that may come next."""
    for number, doing in enumerate(state.threads):
        if doing is not None:
            yield from thread_moves(case, state, number, doing)
    for number, (_, doing) in enumerate(state.consumers):
        yield from consumer_moves(case, state, number, doing)


def thread_moves(case, state, number, doing):
    world = World(case, state)
    kind = doing[0]
    if kind == "do":
        world.did(doing[1])
        world.threads = put(world.threads, number, ("ask", False))
        yield world.next()
    elif kind == "ask":
        job = world.queue.next(number, tired=doing[1])
        after = None if job is Instead.END else ("sleep",) if job is Instead.SLEEP else ("do", job)
        world.threads = put(world.threads, number, after)
        yield world.next()
    else:
        if state.bells[number]:
            world.rung(number)
            world.threads = put(world.threads, number, ("ask", False))
            yield world.next()
        if case.tires:
            world = World(case, state)
            world.threads = put(world.threads, number, ("ask", True))
            yield world.next()


def consumer_moves(case, state, number, doing):
    place = state.consumers[number][0]
    if place < len(case.scripts[number]):
        what, batch = case.scripts[number][place]
        move = {"do": do, "start": start, "sleep": sleep, "ask": ask}.get(doing[0]) or STEPS[what]
        yield from move(case, state, number, doing, batch)


def to(world, number, *after, step=0):
    """One who wants batches is about to do something else; `step`: the next of its script."""
    place = world.consumers[number][0]
    world.consumers = put(world.consumers, number, (place + step, after))
    return world.next()


def add(case, state, number, doing, batch):
    world, jobs = World(case, state), jobs_of(case, batch)
    if doing[1] == len(jobs):
        yield to(world, number, "step", 0, step=1)
        return
    added = world.queue.add(jobs[doing[1]])
    if added.first is not None:
        yield to(world, number, "do", added.first, "step", doing[1])
        return
    if added.wake is not None:
        world.ring(added.wake)
    following = ("step", doing[1] + 1)
    yield to(world, number, *(following if added.start is None else ("start", added.start, *following)))


def start(case, state, number, doing, batch):
    for starts in case.may_start:
        world = World(case, state)
        if starts:
            assert world.threads[doing[1]] is None, "two threads have one number"
            world.threads = put(world.threads, doing[1], ("ask", False))
        else:
            world.queue.not_started(doing[1])
        yield to(world, number, *doing[2:])


def do(case, state, number, doing, batch):
    world = World(case, state)
    world.did(doing[1])
    yield to(world, number, *doing[2:])


def wait(case, state, number, doing, batch):
    world, bell = World(case, state), case.most_threads + number
    assert world.queue.wait(bell, [job for job in jobs_of(case, batch) if not world.times_done[job]])
    world.bells = put(world.bells, bell, 0)
    yield to(world, number, "ask")


def ask(case, state, number, doing, batch):
    world, bell = World(case, state), case.most_threads + number
    job = world.queue.ask(bell)
    if job is Instead.GO:
        assert all(world.times_done[job] for job in jobs_of(case, batch)), "a batch is given before it is done"
        world.queue.leave(bell)
        yield to(world, number, "step", 0, step=1)
    else:
        yield to(world, number, *(("sleep",) if job is Instead.SLEEP else ("do", job, "ask")))


def sleep(case, state, number, doing, batch):
    bell = case.most_threads + number
    if state.bells[bell]:
        world = World(case, state)
        world.rung(bell)
        yield to(world, number, "ask")
    if case.impatient:
        yield to(World(case, state), number, "ask")


def leave(case, state, number, doing, batch):
    world = World(case, state)
    world.dropped |= frozenset(jobs_of(case, batch))
    yield to(world, number, "step", 0, step=1)


STEPS = {BEGIN: add, FINISH: wait, LEAVE: leave}


def holds(case, state):
    """What is so in every state."""
    waiting, not_done, threads, asleep, *_ = state.queue
    assert len(waiting) <= case.most_waiting, "more wait than may"
    assert all(num == 1 for _, num in state.times_done), "a job is done twice"
    assert len(set(waiting)) == len(waiting) and set(waiting) <= not_done
    assert len(threads) <= case.most_threads and set(asleep) <= threads
    running = {number for number, doing in enumerate(state.threads) if doing}
    running |= {doing[1] for _, doing in state.consumers if doing[0] == "start"}
    assert running == threads, "a thread that has ended is counted, or one that runs is not"
    at_work = [doing[1] for doing in state.threads if doing and doing[0] == "do"]
    at_work += [doing[1] for _, doing in state.consumers if doing[0] == "do"]
    assert sorted([*waiting, *at_work]) == sorted(not_done), "a job is lost, or two do it"


def is_over(case, state):
    return all(place == len(script) for (place, _), script in zip(state.consumers, case.scripts, strict=True))


def explored(case):
    """All states that can be reached, and what may follow each."""
    queue = frozen(case.made(case.most_waiting, case.most_threads))
    first = State(
        queue, (None,) * case.most_threads, ((0, ("step", 0)),) * len(case.scripts),
        (0,) * (case.most_threads + len(case.scripts)), (), frozenset(),
    )  # fmt: skip
    found, new = {}, [first]
    while new:
        state = new.pop()
        if state in found:
            continue
        holds(case, state)
        found[state] = set(moves(case, state))
        new += found[state]
    return first, found


def nobody_waits_for_ever(case, found):
    """Where nothing can happen any more, all is over; and all can be over from wherever one is."""
    over = {state for state in found if is_over(case, state)}
    for state, following in found.items():
        if following or state in over:
            continue
        raise AssertionError(f"somebody waits for ever: {state}")
    before = {state: set() for state in found}
    for state, following in found.items():
        for one in following:
            before[one].add(state)
    reached, new = set(), list(over)
    while new:
        state = new.pop()
        if state not in reached:
            reached.add(state)
            new += before[state]
    assert len(reached) == len(found), "somebody may wait for ever"


def all_is_done_in_the_end(case, found):
    """All jobs were done once, or their batch was left and they may still lie there."""
    wanted = {job for script in case.scripts for _, batch in script for job in jobs_of(case, batch)}
    for state, following in found.items():
        if is_over(case, state) and not following:
            assert wanted - state.dropped <= {job for job, _ in state.times_done}
            assert not state.queue[4] and not state.queue[5], "somebody is still waited for"


def num_interleavings(first, found):
    """Ways from the first state to an end; raises where one has no end: then somebody is busy for ever."""
    under_way = set()

    @cache
    def ways(state):
        assert state not in under_way, "something can go on for ever"
        under_way.add(state)
        num = sum(map(ways, found[state])) or 1
        under_way.discard(state)
        return num

    return ways(first)


def check(case):
    first, found = explored(case)
    nobody_waits_for_ever(case, found)
    all_is_done_in_the_end(case, found)
    if not (case.tires or case.impatient):  # where sleepers may look up, they may do so for ever
        num_interleavings(first, found)
    return found


STOPS = (*ahead(range(3))[:-1], (LEAVE, 2), (BEGIN, 3), (FINISH, 3))
"""Two batches are taken, the third was begun and is left; later there is another pass."""

CASES = {
    "one batch after another": Case(),
    "one batch ahead": Case(scripts=(ahead(range(4)),)),
    "batches of two jobs": Case(scripts=(ahead(range(4)),), num_jobs=2),
    "hardly any room": Case(scripts=(ahead(range(4)),), num_jobs=2, most_waiting=1),
    "two who want batches": Case(scripts=(in_turn(range(2)), in_turn(range(2, 4)))),
    "two who want batches, and little room": Case(scripts=(ahead(range(2)), ahead(range(2, 4))), most_waiting=1),
    "a pass is left early": Case(scripts=(STOPS,), num_jobs=2),
    "a pass is left early beside another": Case(scripts=(STOPS, in_turn([4])), most_waiting=1),
    "threads that may not start": Case(scripts=(ahead(range(4)),), num_jobs=2, may_start=(True, False)),
    "no thread starts": Case(scripts=(ahead(range(4)),), num_jobs=2, most_waiting=2, may_start=(False,)),
}


@pytest.mark.parametrize("name", CASES)
def test_all_interleavings_of_two_threads_and_four_batches_come_to_an_end_with_each_job_done_once(name):
    assert len(check(CASES[name])) > 10


TWO = Case(scripts=(in_turn([0]), in_turn([1])), num_jobs=2, most_waiting=1)
LEFT = Case(scripts=(((BEGIN, 0), (BEGIN, 1), (FINISH, 0), (LEAVE, 1), (BEGIN, 2), (FINISH, 2)),))
TIRED = {
    "one batch after another": CASES["one batch after another"],
    "one batch ahead": CASES["one batch ahead"],
    "two who want batches": TWO,
    "a pass is left early": LEFT,
    "threads that may not start": replace(CASES["one batch ahead"], may_start=(True, False)),
}


@pytest.mark.parametrize("name", some(list(TIRED), *(name for name in TIRED if TIRED[name] is not TWO)))
def test_threads_may_end_for_having_nothing_to_do_at_any_time(name):
    """The moment at which one is woken included."""
    assert len(check(replace(TIRED[name], tires=True))) > 10


@pytest.mark.parametrize("name", ["one batch after another", "a pass is left early"])
def test_who_waits_may_ask_again_at_any_time(name):
    check(replace(TIRED[name], tires=True, impatient=True))


def test_jobs_of_the_process_that_was_forked_are_never_waited_for():
    here = Queue(8, 2)
    jobs = ["one", "two"]
    started = [here.add(job).start for job in jobs]
    assert started == [0, 1] and here.next(0) == "one"
    there = Queue(8, 2)
    assert not there.wait("who", jobs) and not there.left
    assert there.add("three").start == 0 and there.wait("who", ["three"]) and there.ask("who") == "three"


# -- a queue with a fault is found out -----------------------------------------------------------------------------


class NobodyIsWoken(Queue):
    """For a job that was added."""

    def add(self, job):
        added = super().add(job)
        return added if added.wake is None else added._replace(wake=None)


class WhoWaitsIsNotWoken(Queue):
    """For what it waits for."""

    def done(self, job):
        super().done(job)
        return []


class SleepsWithoutHelping(Queue):
    """And leaves all to threads, which may not be there."""

    def ask(self, who):
        if self.left[who]:
            self.sleepers.add(who)
            return Instead.SLEEP
        return super().ask(who)


class DoneTwice(Queue):
    """A job stays where it was."""

    def next(self, number, *, tired=False):
        job = super().next(number, tired=tired)
        if not isinstance(job, Instead) and job % 2:
            self.waiting.append(job)
        return job


class NoBound(Queue):
    """Jobs wait in any number."""

    def add(self, job):
        self.most_waiting, most = 10**6, self.most_waiting
        try:
            return super().add(job)
        finally:
            self.most_waiting = most


class TooTired(Queue):
    """One who has slept ends, though it was woken meanwhile and a job waits for it."""

    def next(self, number, *, tired=False):
        if tired:
            if number in self.asleep:
                self.asleep.remove(number)
            return Instead.END
        return super().next(number)


class GivenTooEarly(Queue):
    """A batch is taken for done when its jobs have been taken."""

    def ask(self, who):
        if self.left[who] and not self.waiting:
            return Instead.GO
        return super().ask(who)


@pytest.mark.parametrize(
    ("made", "case"),
    [
        (WhoWaitsIsNotWoken, "one batch after another"),
        (SleepsWithoutHelping, "no thread starts"),
        (DoneTwice, "one batch after another"),
        (NoBound, "hardly any room"),
        (GivenTooEarly, "one batch after another"),
    ],
)
def test_a_faulty_queue_is_found_out(made, case):
    with pytest.raises(AssertionError):
        check(replace(CASES[case], made=made))


def test_a_thread_that_is_not_woken_is_found_out():
    """Who asks for the batch does its job, so nobody waits for ever: but a thread sleeps beside a job."""

    def sleeps_beside_a_job(case):
        return any(
            state.queue[0] and state.threads[0] == ("sleep",) and not state.bells[0] and not is_over(case, state)
            and len(state.queue[3]) < sum(doing == ("sleep",) for doing in state.threads) - sum(state.bells[:1])
            for state in explored(case)[1]
        )  # fmt: skip

    case = replace(CASES["one batch after another"], most_threads=1)
    assert not sleeps_beside_a_job(case)
    assert sleeps_beside_a_job(replace(case, made=NobodyIsWoken))


def test_a_thread_that_ends_too_early_is_found_out():
    with pytest.raises(AssertionError):
        check(replace(CASES["one batch ahead"], made=TooTired, tires=True))
