"""The planning, listing, explaining and discarding around an isolated trial; entering itself is tested end to end."""

import errno
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from flatout.errors import MachineError, UsageError
from flatout.run import enter_isolation, isolation
from flatout.run.isolation import Write, explain
from flatout.run.isolation_plan import MAX_ENTRIES, Disk, Entry, Layer, mount_of, plan_layers, read_mounts

REASON = isolation.available()

MOUNTS = r"""
22 27 0:21 / /proc rw,relatime - proc proc rw
24 27 0:6 / /dev rw,relatime - devtmpfs devtmpfs rw
25 24 0:23 / /dev/shm rw,relatime - tmpfs tmpfs rw
26 24 0:24 / /dev/pts rw,relatime - devpts devpts rw
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard
29 26 0:26 / /dev/pts rw,relatime - devpts devpts rw,mode=600
30 27 0:30 / /home rw - ext4 /dev/vdb rw
31 30 0:31 / /home/u/my\040data rw - nfs4 server:/x rw
32 30 0:32 / /home/u/gone ro - squashfs /dev/loop1 ro
33 30 0:33 / /home/u/p/cache rw - fuse.sshfs far: rw
34 27 0:34 / /mnt/frozen rw - ext4 /dev/vdc ro
"""


@pytest.fixture
def mounts():
    return read_mounts(MOUNTS.strip())


class FakeDisk(Disk):
    """A tree written down: a name with a star is foreign, with a dot a file, with an exclamation mark closed."""

    def __init__(self, tree=None, foreign=()):
        self.tree, self.foreign = tree or {}, foreign

    def is_foreign(self, path):
        return path in self.foreign

    def entries(self, path):
        names = self.tree.get(path, [])
        return tuple(
            Entry(name=n.strip("*!"), is_folder="." not in n, foreign=n.endswith("*"), closed=n.endswith("!"))
            for n in names
        )


def plan(mounts, wanted, *project, tree=None, foreign=(), run_folder=""):
    return plan_layers(mounts, wanted, project=project, disk=FakeDisk(tree, foreign), run_folder=run_folder)


def folders(layers):
    return [layer.folder for layer in layers]


def test_the_text_of_mountinfo_becomes_mounts_with_their_real_names(mounts):
    assert [m.point for m in mounts][7] == "/home/u/my data"
    assert mounts[7].kind == "nfs4"
    assert [m.point for m in mounts if m.read_only] == ["/home/u/gone", "/mnt/frozen"]


def test_optional_fields_of_mountinfo_do_not_shift_the_others():
    (mount,) = read_mounts("1 0 8:1 / / rw shared:1 master:2 propagate_from:3 - xfs /dev/a ro")
    assert (mount.kind, mount.read_only) == ("xfs", True)


@pytest.mark.parametrize(
    ("path", "number"),
    [("/", 27), ("/tmp/x", 27), ("/home", 30), ("/homestead", 27), ("/home/u/my data/a", 31), ("/dev/pts/0", 29)],
)
def test_a_path_lies_on_the_mount_that_a_walk_ends_on(mounts, path, number):
    assert mount_of(mounts, path).number == number


def test_a_later_mount_hides_the_mounts_beneath_it():
    stacked = read_mounts("1 0 8:1 / / rw - ext4 a rw\n2 1 8:2 / /a/b rw - ext4 b rw\n3 1 8:3 / /a rw - ext4 c rw")
    assert mount_of(stacked, "/a/b").number == 3


def test_one_overlay_on_the_outermost_folder_covers_those_in_it(mounts):
    layers = plan(mounts, ["/srv/code/sub", "/srv/code", "/tmp", "/var/tmp", "/tmp"], "/srv/code/sub")
    assert layers == (Layer(folder="/srv/code", required=True), Layer(folder="/tmp"), Layer(folder="/var/tmp"))


def test_a_folder_whose_name_merely_begins_alike_gets_its_own_overlay(mounts):
    assert folders(plan(mounts, ["/srv/a", "/srv/a-b"], "/srv/a")) == ["/srv/a", "/srv/a-b"]


def test_a_folder_with_mounts_beneath_is_rebuilt_and_each_of_its_folders_gets_an_overlay(mounts):
    tree = {"/home/u": ["my data", "gone", "p", "q"], "/home/u/p": ["cache", "src"]}
    assert plan(mounts, ["/home/u", "/home/u/p"], "/home/u/p", tree=tree) == (
        Layer(folder="/home/u", rebuilt=True, required=True),
        Layer(folder="/home/u/my data"),
        Layer(folder="/home/u/p", rebuilt=True, required=True),
        Layer(folder="/home/u/p/cache"),
        Layer(folder="/home/u/p/src"),
        Layer(folder="/home/u/q"),
    )


def test_what_a_plain_run_could_not_enter_needs_no_overlay(mounts):
    layers = plan(mounts, ["/home/u"], "/home/u/p", tree={"/home/u": ["theirs!", "p"]})
    assert folders(layers) == ["/home/u", "/home/u/p"]


def test_a_mount_of_its_own_without_others_beneath_is_one_overlay(mounts):
    assert plan(mounts, ["/home/u/my data/run"], "/home/u/my data/run") == (
        Layer(folder="/home/u/my data/run", required=True),
    )


@pytest.mark.parametrize("path", ["/", "/proc/self", "/dev", "/home/u/gone/x", "/mnt/frozen"])
def test_kernel_interfaces_read_only_disks_and_the_root_get_no_overlay(mounts, path):
    assert plan(mounts, [path, "/tmp"], path) == (Layer(folder="/tmp"),)


def test_a_folder_below_somebody_elses_gets_its_own_overlay_since_that_one_cannot_be_copied_up(mounts):
    wanted, foreign = ["/tmp", "/tmp/ci/u/p", "/tmp/mine"], {"/tmp", "/tmp/ci"}
    assert plan(mounts, wanted, "/tmp/ci/u/p", foreign=foreign) == (
        Layer(folder="/tmp", required=True),
        Layer(folder="/tmp/ci/u/p", required=True),
    )


def test_a_project_with_files_of_another_group_is_rebuilt_as_far_as_they_reach(mounts):
    tree = {"/srv/p": ["a.py*", "out*", "src"], "/srv/p/out": ["x.pt*"], "/srv/p/src": ["b.py"]}
    assert plan(mounts, ["/srv/p", "/tmp"], "/srv/p", tree={**tree, "/tmp": ["other*"]}) == (
        Layer(folder="/srv/p", rebuilt=True, required=True),
        Layer(folder="/srv/p/out", rebuilt=True),
        Layer(folder="/srv/p/src"),
        Layer(folder="/tmp"),
    )


def test_the_run_folder_gets_no_overlay_also_where_all_around_it_does(mounts):
    tree = {"/srv/p": ["runs*"], "/srv/p/runs": ["r1*", "r2*"]}
    layers = plan(mounts, ["/srv/p"], "/srv/p", tree=tree, run_folder="/srv/p/runs/r2")
    assert folders(layers) == ["/srv/p", "/srv/p/runs", "/srv/p/runs/r1"]


def test_a_project_within_home_is_rebuilt_beside_the_overlay_on_home(mounts):
    tree = {"/root/p": ["a.py*"]}
    layers = plan(mounts, ["/root", "/root/p"], "/root/p", tree=tree)
    assert layers == (Layer(folder="/root", required=True), Layer(folder="/root/p", rebuilt=True, required=True))


def test_a_folder_with_very_many_files_is_not_rebuilt_for_the_sake_of_their_group(mounts):
    tree = {"/srv/p": [f"{n}.jpg*" for n in range(MAX_ENTRIES + 1)]}
    assert plan(mounts, ["/srv/p"], "/srv/p", tree=tree) == (Layer(folder="/srv/p", required=True),)


def test_a_mount_that_lies_on_a_kernel_interface_gets_its_own_overlay():
    auto = "1 0 8:1 / / rw - ext4 a rw\n2 1 8:2 / /home/x rw - autofs b rw\n3 2 8:3 / /home/x/y rw - nfs c rw"
    tree = {"/home": ["x", "z"]}
    layers = plan(read_mounts(auto), ["/home", "/home/x/y/p"], "/home/x/y/p", tree=tree)
    assert folders(layers) == ["/home", "/home/x/y/p", "/home/z"]


def test_the_disk_knows_what_is_foreign(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("/etc")
    entries = {entry.name: entry for entry in Disk(frozenset(), frozenset()).entries(str(tmp_path))}
    assert entries["file"] == Entry(name="file", foreign=True)
    assert entries["folder"] == Entry(name="folder", is_folder=True, foreign=True)
    assert entries["link"] == Entry(name="link")
    everyone, oneself = Disk(None, None), Disk(frozenset((os.getuid(),)), frozenset((os.getgid(),)))
    assert not any(entry.foreign for disk in (everyone, oneself) for entry in disk.entries(str(tmp_path)))
    assert Disk(None, frozenset()).is_foreign(str(tmp_path)) and not everyone.is_foreign("/")
    assert everyone.entries("/nowhere") == ()


def test_a_process_whose_root_is_not_listed_is_planned_too():
    assert folders(plan((), ["/tmp"], "/tmp")) == ["/tmp"]


@pytest.mark.parametrize(
    ("stage", "number", "settings", "part"),
    [
        ("user namespace", 28, {"user.max_user_namespaces": "0"}, "`user.max_user_namespaces=0`"),
        ("user namespace", 1, {"kernel.unprivileged_userns_clone": "0"}, "`kernel.unprivileged_userns_clone=0`"),
        ("user namespace", 1, {"seccomp": "2"}, "seccomp filter, as in Docker"),
        ("id map", 1, {"kernel.apparmor_restrict_unprivileged_userns": "1"}, "AppArmor"),
        ("mounts", 13, {"kernel.apparmor_restrict_unprivileged_userns": "1"}, "AppArmor"),
        ("mount namespace", 28, {"user.max_mnt_namespaces": "0"}, "`user.max_mnt_namespaces=0`"),
        ("mounts", 22, {"kernel": "5.10.0-19-amd64"}, "Linux 5.10.0-19-amd64 is too old"),
        ("mounts", 38, {"kernel": "4.18.0"}, "too old"),
        ("mounts", 19, {}, "modprobe overlay"),
        ("mounts", 1, {}, "seccomp or AppArmor profile"),
        ("user namespace", 1, {}, "the user namespace could not be set up: detail"),
        ("mounts", 22, {"kernel": "5.15"}, "could not be set up: detail"),
    ],
)
def test_a_refusal_is_explained_by_the_setting_that_causes_it(stage, number, settings, part):
    assert part in explain(stage, number, "detail", {"kernel": "6.8.0-31-generic", "seccomp": "0", **settings})


def test_the_settings_of_this_machine_are_read():
    found = isolation.read_settings()
    assert found["kernel"] == os.uname().release
    assert found["seccomp"].isdigit()


@pytest.fixture
def made(tmp_path):
    """The folders of a trial and the spec that `isolate` writes for them."""
    folder, run = tmp_path / "work", tmp_path / "work" / ".flatout" / "r1"
    run.mkdir(parents=True)
    scratch = run / "scratch"
    argv = isolation.isolate(["python", "train.py"], folder=folder, script_folder=None, run_folder=run, scratch=scratch)
    return folder, run, scratch, argv


def test_the_command_line_enters_and_then_names_the_command(made):
    _, _, scratch, argv = made
    assert argv[1:4] == ["-I", "-S", "-X"]
    assert argv[5:] == [enter_isolation.__file__, str(scratch / "spec.json"), "--", "python", "train.py"]


def test_the_spec_names_the_folders_by_their_real_paths(tmp_path, made):
    folder, run, scratch, _ = made
    link = tmp_path / "link"
    link.symlink_to(folder)
    isolation.isolate(["x"], folder=link, script_folder=link, run_folder=link / ".flatout/r1", scratch=scratch)
    spec = json.loads((scratch / "spec.json").read_text())
    assert (spec["folder"], spec["run_folder"], spec["scratch"]) == (str(folder), str(run), str(scratch))
    assert any(layer["required"] for layer in spec["layers"])


def test_folders_that_hold_caches_get_an_overlay_too(tmp_path, made, monkeypatch):
    _, _, scratch, _ = made
    monkeypatch.setenv("HF_HOME", "/usr/share")
    isolation.isolate(["x"], folder=tmp_path, script_folder=None, run_folder=scratch.parent, scratch=scratch)
    assert "/usr/share" in {layer["folder"] for layer in json.loads((scratch / "spec.json").read_text())["layers"]}


def test_a_run_folder_that_holds_the_working_folder_is_refused(tmp_path):
    with pytest.raises(UsageError, match="holds the script or its working folder"):
        isolation.isolate(
            ["x"], folder=tmp_path / "a", script_folder=None, run_folder=tmp_path, scratch=tmp_path / "scratch"
        )
    assert not list(tmp_path.iterdir())


def test_a_scratch_outside_the_run_folder_is_refused(tmp_path):
    for scratch in (tmp_path / "run", tmp_path / "elsewhere", tmp_path / "run" / ".." / "b"):
        with pytest.raises(ValueError, match="not inside the run folder"):
            isolation.isolate(
                ["x"], folder=tmp_path / "a", script_folder=None, run_folder=tmp_path / "run", scratch=scratch
            )


@pytest.mark.skipif(REASON is not None, reason=f"no isolation here: {REASON}")
def test_folders_of_others_that_go_while_a_trial_starts_stop_nothing(made):
    folder, _, scratch, _ = made
    command = [sys.executable, "-I", "-S", "-c", "print('inside')"]
    argv = isolation.isolate(command, folder=folder, script_folder=None, run_folder=scratch.parent, scratch=scratch)
    spec = json.loads((scratch / "spec.json").read_text())
    gone = {"folder": f"{folder}/gone", "rebuilt": True, "required": False}
    spec["layers"] += [gone, {"folder": f"{folder}/gone/child", "rebuilt": False, "required": False}]
    (scratch / "spec.json").write_text(json.dumps(spec))
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=60)
    assert (done.stdout, isolation.refusal(scratch)) == ("inside\n", None), done.stderr


def test_a_folder_is_listed_without_what_goes_meanwhile(tmp_path, monkeypatch):
    class Going:
        name = "going"

        def is_symlink(self):
            return False

        def stat(self, *, follow_symlinks):
            raise FileNotFoundError

    (tmp_path / "stays").mkdir()
    listed = [*os.scandir(tmp_path), Going()]
    monkeypatch.setattr(os, "scandir", lambda path: listed)
    assert [entry.name for entry in Disk(None, None).entries(str(tmp_path))] == ["stays"]


def test_a_spec_that_a_full_disk_cut_off_is_a_trial_that_wrote_nothing(made):
    _, _, scratch, _ = made
    (scratch / "spec.json").write_text("")
    assert isolation.written(scratch) == []
    isolation.discard(scratch)
    assert not scratch.exists()


def test_a_trial_that_never_reported_was_refused(made):
    _, _, scratch, _ = made
    error = isolation.refusal(scratch)
    assert isinstance(error, MachineError)
    assert "--allow-writes" in error.hint


def report(scratch, **fields):
    (scratch / enter_isolation.REPORT).write_text(json.dumps(fields))


def test_a_refusal_says_why_and_what_to_do(made):
    _, _, scratch, _ = made
    report(scratch, entered=False, stage="mounts", errno=19, detail="No such device")
    error = isolation.refusal(scratch)
    assert error.exit_code == 5
    assert "overlay" in error.cause
    assert "--allow-writes" in error.hint


def test_a_command_that_does_not_exist_is_not_blamed_on_the_machine(made):
    _, _, scratch, _ = made
    report(scratch, entered=False, stage="command", errno=2, detail="No such file or directory")
    error = isolation.refusal(scratch)
    assert "did not start" in error.error
    assert "--allow-writes" not in error.hint


def test_an_entered_trial_was_not_refused_and_its_notes_are_kept(made):
    _, _, scratch, _ = made
    report(scratch, entered=True, notes=["kept in memory"])
    assert isolation.refusal(scratch) is None
    assert isolation.notes(scratch) == ("kept in memory",)


def test_a_machine_that_cannot_isolate_is_a_three_part_error(monkeypatch):
    monkeypatch.setattr(isolation, "available", lambda: "`user.max_user_namespaces=0`")
    with pytest.raises(MachineError, match="cannot be isolated") as caught:
        isolation.require()
    assert "--allow-writes" in caught.value.hint
    assert "max_user_namespaces" in caught.value.cause


def upper_of(scratch, folder):
    layers = json.loads((scratch / "spec.json").read_text())["layers"]
    number, layer = next((n, x) for n, x in enumerate(layers) if f"{folder}/".startswith(f"{x['folder']}/"))
    upper = scratch / "layers" / str(number) / "upper"
    inner = upper / os.path.relpath(folder, layer["folder"])
    inner.mkdir(parents=True, exist_ok=True)
    return inner


def test_written_lists_what_the_user_would_have_found(made):
    folder, _, scratch, _ = made
    for name in ("changed.txt", "deleted.txt"):
        (folder / name).write_text("before")
    (folder / "redone").mkdir()
    upper = upper_of(scratch, folder)
    (upper / "changed.txt").write_text("after it")
    (upper / "new").mkdir()
    (upper / "new" / "ckpt.pt").write_bytes(bytes(1000))
    (upper / "empty").mkdir()
    (upper / "link").symlink_to("/etc/passwd")
    os.mknod(upper / "deleted.txt", stat.S_IFCHR, 0)
    os.mknod(upper / "never-was", stat.S_IFCHR, 0)
    (upper / "redone").mkdir()
    try:
        os.setxattr(upper / "redone", "user.overlay.opaque", b"y")
    except OSError:
        pytest.skip("this file system has no user attributes")
    assert isolation.written(scratch) == [
        Write(path=f"{folder}/changed.txt", change="changed", file_bytes=8),
        Write(path=f"{folder}/deleted.txt", change="deleted"),
        Write(path=f"{folder}/empty", change="created"),
        Write(path=f"{folder}/link", change="created"),
        Write(path=f"{folder}/new/ckpt.pt", change="created", file_bytes=1000),
        Write(path=f"{folder}/redone", change="replaced"),
    ]


def test_written_reads_folders_that_the_trial_made_unreadable(made):
    folder, _, scratch, _ = made
    locked = upper_of(scratch, folder) / "locked"
    locked.mkdir()
    (locked / "a").write_text("x")
    locked.chmod(0)
    assert [write.path for write in isolation.written(scratch)] == [f"{folder}/locked/a"]


def test_what_was_written_lies_in_the_innermost_of_several_overlays(made):
    folder, _, scratch, _ = made
    spec = json.loads((scratch / "spec.json").read_text())
    layers = [{"folder": "/"}, {"folder": str(folder)}, {"folder": str(folder / "deeper")}, {"folder": f"{folder}-not"}]
    (scratch / "spec.json").write_text(json.dumps({**spec, "layers": layers}))
    assert isolation.seen(scratch, folder / "a.json") == scratch / "layers" / "1" / "upper" / "a.json"
    assert isolation.seen(scratch, folder / "deeper" / "b") == scratch / "layers" / "2" / "upper" / "b"


def test_written_is_empty_where_no_trial_ran(tmp_path):
    assert isolation.written(tmp_path / "nothing") == []


def test_the_folders_a_trial_may_write_to_are_known_to_the_recorder(made):
    folder, run, scratch, _ = made
    folders = isolation.writable(scratch)
    assert str(run) in folders and list(folders) == sorted(folders)
    assert any(f"{folder}/".startswith(f"{open_folder}/") for open_folder in folders)


def test_a_scratch_that_an_interrupted_trial_left_is_emptied_first(made):
    folder, run, scratch, _ = made
    (upper_of(scratch, folder) / "stale").write_text("x")
    isolation.isolate(["x"], folder=folder, script_folder=None, run_folder=run, scratch=scratch)
    assert isolation.written(scratch) == []


def test_discard_removes_everything_whatever_its_mode_and_leaves_what_links_point_to(tmp_path, made):
    _, run, scratch, _ = made
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "model.pt").write_text("weights")
    precious.chmod(0o755)
    upper = scratch / "layers" / "0" / "upper"
    (upper / "a" / "b").mkdir(parents=True)
    (upper / "a" / "b" / "file").write_text("x")
    (upper / "a" / "out").symlink_to(precious)
    (scratch / "out").symlink_to(precious)
    (upper / "a" / "b" / "broken").symlink_to("/nowhere")
    os.mkfifo(upper / "a" / "fifo")
    (scratch / "layers" / "0" / "work" / "work").mkdir(parents=True)
    for path, mode in [(upper / "a" / "b" / "file", 0), (upper / "a" / "b", 0o500), (upper / "a", 0o000)]:
        path.chmod(mode)
    (scratch / "layers" / "0" / "work" / "work").chmod(0)
    isolation.discard(scratch)
    assert list(run.iterdir()) == []
    assert (precious / "model.pt").read_text() == "weights"
    assert stat.S_IMODE(precious.stat().st_mode) == 0o755


def test_discard_removes_folders_that_are_nested_deeper_than_a_path_can_say(made):
    _, _, scratch, _ = made
    before = os.open(".", os.O_RDONLY)
    try:
        os.chdir(scratch)
        for _ in range(1500):
            os.mkdir("deep")
            os.chdir("deep")
        Path("file").write_text("x")
    finally:
        os.fchdir(before)
        os.close(before)
    isolation.discard(scratch)
    assert not scratch.exists()


def test_discard_twice_or_of_nothing_is_fine(tmp_path, made):
    _, _, scratch, _ = made
    isolation.discard(scratch)
    isolation.discard(scratch)
    isolation.discard(tmp_path / "never")
    (tmp_path / "empty").mkdir()
    isolation.discard(tmp_path / "empty")
    assert not (tmp_path / "empty").exists()


def test_discard_refuses_a_folder_that_no_trial_made(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(MachineError, match="cannot be removed"):
        isolation.discard(tmp_path)
    assert (tmp_path / "thesis.tex").exists()


def test_discard_refuses_a_link_to_a_scratch_folder(tmp_path, made):
    _, _, scratch, _ = made
    (tmp_path / "link").symlink_to(scratch)
    with pytest.raises(MachineError, match="cannot be removed"):
        isolation.discard(tmp_path / "link")
    assert (scratch / "spec.json").exists()


def test_a_file_system_without_extended_attributes_can_be_overlaid(tmp_path, monkeypatch):
    def refuse(number):
        def listxattr(path):
            raise OSError(number, os.strerror(number), path)

        monkeypatch.setattr(enter_isolation.os, "listxattr", listxattr)

    for name in ("source", "target"):
        (tmp_path / name).mkdir()
    (tmp_path / "source").chmod(0o750)
    refuse(errno.ENOTSUP)
    enter_isolation._copy_attributes(str(tmp_path / "source"), str(tmp_path / "target"))
    assert stat.S_IMODE((tmp_path / "target").stat().st_mode) == 0o750
    refuse(errno.EIO)
    with pytest.raises(OSError, match="Input/output"):
        enter_isolation._copy_attributes(str(tmp_path / "source"), str(tmp_path / "target"))
