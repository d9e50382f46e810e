"""How does flatout get into a Python process that it did not write? Through this file, which `site` imports at start.

The parent puts this folder in front of `PYTHONPATH`. Here we make ourselves invisible again (path, environment, the
`sitecustomize` that we shadow), and wait for the framework's import. Nothing else happens in a process that imports
none. Standard library only; whatever goes wrong, the user's program starts.

Any Python that the user's program starts reads this file, Python 2 as well: so no syntax in here is newer than that,
and only interpreters that flatout itself runs on are entered.
"""
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN002, ANN202, ANN204, SIM105

import os
import sys

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_AWAITED = ("torch", "subprocess")
_READ_AT_START = (b"LD_PRELOAD", b"GLIBC_TUNABLES", b"MALLOC_CONF", b"TCMALLOC_LARGE_ALLOC_REPORT_THRESHOLD",
                  b"PYTHONHASHSEED")  # fmt: skip
_kept = {}  # what we took out of `os.environ`, as bytes


class _Finder:
    """Lets the awaited modules be found as always, by a specification that tells us when their import is over."""

    def __init__(self, session):
        self.session = session
        self.arrived = {name for name in _AWAITED if name in sys.modules}

    def find_spec(self, name, path=None, target=None):
        """Ask the finders after this one."""
        if name not in _AWAITED:
            return None
        for finder in sys.meta_path:
            find_spec = None if finder is self else getattr(finder, "find_spec", None)
            spec = None if find_spec is None else find_spec(name, path, target)
            if spec is not None:
                return _watched(spec, self)
        return None

    def arrive(self, name):
        """The import of `name` is over; after the last one nothing of us is left in the import system."""
        if name not in sys.modules:  # it failed, and may be tried again
            return
        self.arrived.add(name)
        if self.arrived.issuperset(_AWAITED) and self in sys.meta_path:
            sys.meta_path.remove(self)
        if name == "subprocess":
            _reach_children(sys.modules[name])
        else:
            _enter(self.session, name)


def _watched(spec, finder):
    """The same specification, watched until its module is complete.

    `importlib` ends every import by setting `_initializing` to false, whether it succeeded or not. So no frame of ours
    is on the stack while the module runs (a failing import shows the user's frames and Python's own), and the loader
    stays the real one.
    """
    plain = type(spec)

    class Watched(plain):
        def __setattr__(self, name, value):
            plain.__setattr__(self, name, value)
            if name == "_initializing" and not value:
                object.__setattr__(self, "__class__", plain)
                finder.arrive(self.name)

    Watched.__name__, Watched.__qualname__, Watched.__module__ = plain.__name__, plain.__qualname__, plain.__module__
    try:
        object.__setattr__(spec, "__class__", Watched)
    except TypeError:  # a finder of somebody else's with specifications of its own: stay out
        pass
    return spec


def _enter(session, name):
    try:
        _load_flatout()
        from flatout.child.enter import enter

        enter(session, name, _kept.get(b"FLATOUT_RANK"))
    except Exception as problem:  # noqa: BLE001  the user's program comes first
        _note(session, problem)


def _load_flatout():
    """Import the flatout that this file belongs to, without a trace on `sys.path`."""
    import _frozen_importlib
    import _frozen_importlib_external

    package = os.path.dirname(os.path.dirname(_FOLDER))
    loaded = sys.modules.get("flatout")
    if loaded is not None:
        if package not in map(os.path.abspath, getattr(loaded, "__path__", ())):
            raise ImportError("the script has a module `flatout` of its own")
        return
    theirs = _frozen_importlib_external.PathFinder.find_spec("flatout")
    if theirs is not None and _is_another(theirs):
        raise ImportError("the script's folder has a module `flatout` of its own")
    place = os.path.join(package, "__init__.py")
    loader = _frozen_importlib_external.SourceFileLoader("flatout", place)
    spec = _frozen_importlib_external.spec_from_file_location(
        "flatout", place, loader=loader, submodule_search_locations=[package]
    )
    module = _frozen_importlib.module_from_spec(spec)
    sys.modules["flatout"] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules["flatout"]
        raise


def _is_another(spec):
    """Whether the `flatout` that the user's program would import is something else than flatout."""
    places = list(spec.submodule_search_locations or ())
    if any(os.path.exists(os.path.join(place, "child", "bootstrap", "sitecustomize.py")) for place in places):
        return False
    # A mere folder of that name is a package to Python: a checkout of flatout, or modules of the user's.
    return spec.origin is not None or any(name.endswith(".py") for place in places for name in os.listdir(place))


def _note(session, problem):
    """Leave the reason in the trace, unless some process of this run did get in."""
    if os.environ.get("FLATOUT_DEBUG"):
        import traceback

        traceback.print_exc()
    try:
        import json

        with open(session, encoding="utf-8") as file:
            spec = json.load(file)
        if not os.path.exists(spec["claim"]):
            failure = {"kind": "failure", "stage": "enter", "error": type(problem).__name__, "message": str(problem)}
            with open(spec["trace"], "a", encoding="utf-8") as file:
                file.write(json.dumps(failure) + "\n")
    except Exception:  # noqa: BLE001  then nobody learns of it
        return


def _reach_children(subprocess):
    """Give a child that is started with an environment of its own what a child without one inherits anyway."""
    start = getattr(subprocess, "_fork_exec", None)
    if start is None or b"FLATOUT_SESSION" not in _kept:
        return

    def _fork_exec(args, executables, close_fds, fds, cwd, environment, *rest):
        try:
            return start(args, executables, close_fds, fds, cwd, _for_child(args, environment), *rest)
        except BaseException as problem:
            if problem.__traceback__ is not None:
                problem.__traceback__ = problem.__traceback__.tb_next  # without this frame
            raise

    subprocess._fork_exec = _fork_exec


def _for_child(args, environment):
    """The environment of a child, with our variables in it; None where it inherits them by itself."""
    apart = _stays_apart(args)
    if environment is None:
        if not apart and os.environ.get("PYTHONPATH") == _users_path():
            return None
        environment = [name + b"=" + value for name, value in os.environ._data.items()]  # the user's
    entries = list(environment)
    if apart or any(entry.startswith(b"FLATOUT_SESSION=") for entry in entries):
        return entries
    theirs = [entry for entry in entries if entry.startswith(b"PYTHONPATH=")]
    path = os.fsencode(_FOLDER)
    ours = [b"FLATOUT_SESSION=" + _kept[b"FLATOUT_SESSION"]]
    if theirs:
        value = theirs[0].partition(b"=")[2]
        path += os.fsencode(os.pathsep) + value if value else b""
        ours.append(b"FLATOUT_PYTHONPATH=" + value)
    # The same place in the list, so that the child sees its variables in the same order.
    entries = [b"PYTHONPATH=" + path if entry in theirs else entry for entry in entries]
    return entries + ours + ([] if theirs else [b"PYTHONPATH=" + path])


def _stays_apart(args):
    """Whether a child is a Python that is told (-I, -E, -S) not to read this file, so that nothing would hide us."""
    words = [os.fsencode(word) for word in args]
    if not words or not os.path.basename(words[0]).startswith(b"python"):
        return False
    following = iter(words[1:])
    for word in following:
        if word[:1] != b"-" or word[:2] == b"--":
            return False
        for position in range(1, len(word)):
            letter = word[position : position + 1]
            if letter in b"IES":
                return True
            if letter in b"cm":
                return False
            if letter in b"WX":
                if position == len(word) - 1:
                    next(following, None)
                break
    return False


def _users_path():
    value = _kept.get(b"FLATOUT_PYTHONPATH")
    return None if value is None else os.fsdecode(value)


def _hide():
    """Take our variables out of `os.environ` alone: the process keeps them, so that its children inherit them."""
    session = os.environ.get("FLATOUT_SESSION")
    values = getattr(os.environ, "_data", None)
    if session is None or not isinstance(values, dict):  # another Python: visible rather than broken
        return session
    for name in _READ_AT_START:
        own = values.pop(b"FLATOUT_" + name, None)
        if own is not None:
            _give_back(os.fsdecode(name), os.fsdecode(own))
    rank = values.pop(b"FLATOUT_RANK", None)
    if rank is not None:  # for this process alone: what it starts is no rank
        os.unsetenv("FLATOUT_RANK")
        if int(rank.split()[0]) == os.getpid():
            _kept[b"FLATOUT_RANK"] = rank
            _set_up_as_rank(rank.split(), values.get(b"FLATOUT_RANK_FOLDER"), values.get(b"FLATOUT_RANK_STDIN"))
    for name in ("FLATOUT_RANK_FOLDER", "FLATOUT_RANK_STDIN"):
        values.pop(name.encode(), None)
        os.unsetenv(name)
    for name in (b"FLATOUT_SESSION", b"FLATOUT_PYTHONPATH"):
        if name in values:
            _kept[name] = values.pop(name)
    own = _without_us(values.get(b"PYTHONPATH"), _kept.get(b"FLATOUT_PYTHONPATH"))
    if own is None:
        values.pop(b"PYTHONPATH", None)
        _kept.pop(b"FLATOUT_PYTHONPATH", None)
    else:
        values[b"PYTHONPATH"] = _kept[b"FLATOUT_PYTHONPATH"] = own  # in its place
    return session


def _without_us(found, own):
    """The user's `PYTHONPATH`: `own` as it was given, or what a program in between has made of it and of our folder."""
    ours, separator = os.fsencode(_FOLDER), os.fsencode(os.pathsep)
    if found is None or found == (ours if own is None else ours + separator + own):
        return own
    if own is not None and ours + separator in found:
        return found.replace(ours + separator, b"", 1)
    return found.replace(ours, b"", 1)


def _set_up_as_rank(words, folder, stdin):
    """Let the first rank go first where two had better not do the same, or could not."""
    if folder is None:
        return
    folder, rank, local = os.fsdecode(folder), int(words[1]), int(words[2])
    try:
        _load_flatout()
        from flatout.child import rank_io
        from flatout.child.rank_setup import arm

        if local:
            rank_io.share_folders(folder)
            arm(folder, rank, local, int(words[6]))
            if stdin is not None:
                rank_io.refuse_stdin(folder, rank, int(words[3]))
    except Exception:  # noqa: BLE001  then it sets up as rank 0 does
        if os.environ.get("FLATOUT_DEBUG"):
            import traceback

            traceback.print_exc()


def _give_back(name, own):
    """Put the user's variable in the place of ours, in the process as well: its children are not to have ours."""
    os.unsetenv("FLATOUT_" + name)
    if own:
        os.environ[name] = own[1:]
    else:
        os.environ.pop(name, None)


def _chain():
    """Import the `sitecustomize` that we shadow; where there is none, this raises what a plain start raises."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or os.curdir) != _FOLDER]
    sys.path_importer_cache.pop(_FOLDER, None)
    _kept[b""] = sys.modules.pop("sitecustomize", None)  # kept alive: Python 2 empties a module that nobody holds
    import sitecustomize  # noqa: F401


_session = _hide()
if _session and sys.version_info >= (3, 11):
    try:
        _finder = _Finder(_session)
        sys.meta_path.insert(0, _finder)
        for _name in sorted(_finder.arrived):  # imported by a `.pth` file, before us
            _finder.arrive(_name)
    except Exception:  # noqa: BLE001
        _finder = None
_chain()
