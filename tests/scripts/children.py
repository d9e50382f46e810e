"""Starts children in every way that Python knows; each prints its environment and where it finds modules."""

import multiprocessing
import os
import subprocess
import sys

SHOW = "import os, sys; print(sys.argv[1:], list(os.environ.items()), sys.path, 'sitecustomize' in sys.modules)"


def show(kind):
    print(kind, list(os.environ.items()), sys.path, flush=True)


def in_fork(execute):
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        execute()
        os._exit(99)
    os.waitpid(pid, 0)


if __name__ == "__main__":
    python = sys.executable

    def command(name, *flags):
        return [python, *flags, "-c", SHOW, name]

    sys.stdout.flush()
    subprocess.run(command("none"), check=True)
    subprocess.run(command("copy"), env=os.environ.copy(), check=True)
    subprocess.run(command("more"), env={**os.environ, "PYTHONPATH": "/more"}, check=True)
    subprocess.run(command("few"), env={"LANG": "C"}, check=True)
    subprocess.run(command("open"), close_fds=False, check=True)
    for flag in ("-I", "-E", "-S", "-B"):
        subprocess.run(command(flag, "-W", "ignore", flag), check=True)
        subprocess.run(command(flag + " own", flag), env=dict(os.environ), check=True)
    subprocess.run(f'{python} -c "{SHOW}" shell', shell=True, check=True)
    print(subprocess.check_output(command("output"), text=True))
    os.system(f'{python} -c "{SHOW}" system')
    in_fork(lambda: os.execv(python, command("execv")))
    in_fork(lambda: os.execve(python, command("execve"), os.environ))
    os.spawnv(os.P_WAIT, python, command("spawnv"))
    os.waitpid(os.posix_spawn(python, command("posix_spawn"), os.environ), 0)
    for method in ("fork", "spawn", "forkserver"):
        process = multiprocessing.get_context(method).Process(target=show, args=(method,))
        process.start()
        process.join()
    os.environ["PYTHONPATH"] = "/changed"
    sys.stdout.flush()
    subprocess.run(command("changed"), check=True)
    if sys.argv[1:] == ["delete"]:
        del os.environ["PYTHONPATH"]
        subprocess.run(command("deleted"), check=True)
    try:
        subprocess.run([1, 2])
    except TypeError:
        import traceback

        traceback.print_exc()
    try:
        subprocess.run(["/no/such/program"])
    except OSError:
        traceback.print_exc()
