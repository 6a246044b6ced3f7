"""The command line: one clear sentence for whatever is wrong, exit code 2."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing import Std
from torch.distributed.elastic.multiprocessing.api import to_map
from torch.distributed.run import get_args_parser

from regrow import cli
from regrow.agent import command_line, flags, interfaces, torchrun

SCRIPT = str(Path(__file__).with_name("agent_worker.py"))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--frobnicate", SCRIPT], "unrecognized arguments|required"),
        ([], "the following arguments are required"),
        (["/no/such/script.py"], "no such script: /no/such/script.py"),
        (["--no-python", "no-such-program"], "cannot execute 'no-such-program'"),
        (["--no-python", "-m", "x"], "cannot be used together"),
        (["--nproc-per-node", "0", SCRIPT], "--nproc-per-node must be at least 1, got 0"),
        (["--nproc-per-node", "many", SCRIPT], "Unsupported nproc_per_node value: many"),
        (["--nnodes", "1:2", SCRIPT], "set REGROW_TOKEN or give --token-file"),
        (["--nnodes", "2:1", "--rdzv-endpoint", "h:1", SCRIPT], "MAX is less than MIN"),
        (["--standby", SCRIPT], "set REGROW_TOKEN or give --token-file"),
        (["--standby", "--standalone", SCRIPT], "--standalone is for one node, got --standby"),
        (["--standby", "--node-rank", "0", "--rdzv-endpoint", "h:1", SCRIPT], "cannot be used together"),
        (["--nproc-per-node", "2", "--slots", "1", SCRIPT], "--slots 1 is less than --nproc-per-node 2"),
        (["--nnodes", "x", SCRIPT], "--nnodes must be N or MIN:MAX"),
        (["--nnodes", "2", SCRIPT], "set REGROW_TOKEN or give --token-file"),
        (["--node-rank", "1", SCRIPT], "--node-rank must lie between 0 and 0"),
        (["--standalone", "--nnodes", "2", SCRIPT], "--standalone is for one node"),
        (["--max-restarts", "-1", SCRIPT], "--max-restarts must not be negative"),
        (["--policy", "checkfreq", SCRIPT], "--policy checkfreq goes back to checkpoints on storage: say where"),
        (["--policy", "restart", SCRIPT], "--policy restart goes back to checkpoints on storage: say where"),
        (["--policy", "commit", "--commit-every", "0", SCRIPT], "--commit-every must be at least 1 step, got 0"),
        (["--policy", "commit", "--snapshot-every", "2", SCRIPT], "leave out --snapshot-every"),
        (["--policy", "commit", "--force-source", "disk", SCRIPT], "--force-source is for --policy ladder"),
        (["--spares", "-1", SCRIPT], "--spares must not be negative"),
        (["--spares", "x", SCRIPT], "invalid int value"),
        (["--dead-after", "0", SCRIPT], "--dead-after must be a positive number"),
        (["--dead-after", "nan", SCRIPT], "--dead-after must be a positive number"),
        (["--stuck-after", "1", SCRIPT], "is shorter than --dead-after"),
        (["--rdzv-backend", "etcd", SCRIPT], "--rdzv-backend etcd is not supported"),
        (["--rdzv-conf", "join_timeout=x", SCRIPT], "--rdzv-conf: could not convert"),
        (["--rdzv-conf", "nonsense", SCRIPT], "--rdzv-conf"),
        (["--rdzv-id", "a/b", SCRIPT], "--rdzv-id may hold"),
        (["--redirects", "9", SCRIPT], "--redirects"),
        (["--local-ranks-filter", "a", SCRIPT], "--local-ranks-filter must be a list"),
        (
            ["--interface", "nope0", SCRIPT],
            "there is no such interface, this host has lo (127.0.0.1",
        ),
        (["--host-addr", "192.0.2.77", SCRIPT], "--host-addr 192.0.2.77 is not an address of this host"),
        (
            ["--local-addr", "192.0.2.77", SCRIPT],
            "--local-addr 192.0.2.77 is not an address of this host",
        ),
        (["--host-addr", "no such name", SCRIPT], "--host-addr no such name is not an address"),
        (
            ["--host-addr", "0.0.0.0", SCRIPT],
            "would be all of this host's addresses: name one of lo",
        ),
        (["--host-addr", "127.0.0.1", "--local-addr", "127.0.0.2", SCRIPT], "contradict each other: give one"),
        (["--nnodes", "2", "--rdzv-endpoint", "0.0.0.0:5", SCRIPT], "--rdzv-endpoint 0.0.0.0 would be all addresses"),
        (["--snapshot-domain", "a\nb", SCRIPT], "--snapshot-domain must be a name"),
        (["--snapshot-domain", "", SCRIPT], "--snapshot-domain must be a name"),
        (["--token-file", "/no/such/file", SCRIPT], "No such file"),
        (["--run-path", SCRIPT], "--run-path is not supported"),
        (["--virtual-local-rank", SCRIPT], "--virtual-local-rank is not supported"),
        (["--signals-to-handle", "SIGUSR1", SCRIPT], "--signals-to-handle is not supported"),
        (["--start-method", "fork", SCRIPT], "--start-method fork is not supported: forkserver and spawn are"),
        (["--log-dir", SCRIPT, SCRIPT], "is not a directory"),
        (["--nnodes", "2", "--rdzv-endpoint", "host:0", SCRIPT], "--rdzv-endpoint must be HOST:PORT"),
        (["--store", "redis://a:1", SCRIPT], "--store must be etcd://HOST:PORT"),
        (["--store", "etcd://", SCRIPT], "--store must be etcd://HOST:PORT"),
        (["--store", "etcd://a:x", SCRIPT], "--store must be etcd://HOST:PORT"),
        (["--store", "etcd://u:p@a:1", SCRIPT], "--store with a user and password is not supported yet"),
        (["--store", "etcds://a:1", SCRIPT], "--store etcds:// is not supported yet"),
        (["--store-timeout", "1", SCRIPT], "--store-timeout must be at least 2 seconds"),
        (["--nnodes", "2", "--rdzv-endpoint", "h:1", "--store", "etcd://a:1", SCRIPT], "needs --rdzv-id, the same"),
    ],
)
def test_wrong_command_lines(words, sentence, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(command_line.tempfile, "tempdir", str(tmp_path))
    if "--rdzv-endpoint" in words:
        monkeypatch.setenv("REGROW_TOKEN", "x")
    else:
        monkeypatch.delenv("REGROW_TOKEN", raising=False)
    assert cli.main(["run", *words]) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("regrow run: error: ")
    assert any(part in last for part in sentence.split("|"))


def parse(tmp_path, *words):
    return command_line.parse(["--log-dir", str(tmp_path / "logs"), *words])


def test_torchruns_spelling(tmp_path):
    options = parse(tmp_path, "--nproc_per_node=2", "--max_restarts=3", "--rdzv_id=x", SCRIPT, "--flag", "-m")
    assert (options.nproc, options.max_restarts, options.run_id) == (2, 3, "x")
    assert options.command == (sys.executable, "-u", SCRIPT, "--flag", "-m")
    assert parse(tmp_path, "-m", "pkg.mod", "a").command == (sys.executable, "-u", "-m", "pkg.mod", "a")
    assert parse(tmp_path, "--no-python", "true", "a").command == ("true", "a")


def test_a_scripts_own_flags_are_its_own(tmp_path):
    """Also those that are the beginning of one or several of ours."""
    own = ("--virtual", "2", "--n", "3", "--spares", "4")
    options = parse(tmp_path, "--nproc-per-node", "2", SCRIPT, *own)
    assert options.command == (sys.executable, "-u", SCRIPT, *own)
    assert options.spares == 0


def test_defaults_of_our_own(tmp_path):
    options = parse(tmp_path, SCRIPT)
    assert (options.max_restarts, options.node_rank, options.spares, options.grace_s) == (100, None, 0, 5.0)
    assert len(options.token) == 32
    assert parse(tmp_path, SCRIPT).token != options.token


def test_torchruns_flags_are_torchruns():
    """Names, types, defaults, choices; a release of PyTorch that adds or changes one is told here."""
    theirs = {action.dest: action for action in get_args_parser()._actions if action.option_strings}
    ours = {flag.dest: flag for flag in torchrun.FLAGS}
    assert ours.keys() == theirs.keys() - {"help"}
    made = {action.dest: action for action in flags.parser()._actions}
    for dest, flag in ours.items():
        action = theirs[dest]
        assert sorted(made[dest].option_strings) == sorted(action.option_strings)
        assert made[dest].nargs == action.nargs
        assert flag.default == action.default, dest
        assert flag.switch == (action.nargs == 0), dest
        assert flag.choices == (action.choices and tuple(action.choices)), dest
        assert flag.from_env == (type(action).__module__ == "torch.distributed.argparse_util"), dest
        if not flag.switch and dest not in ("duplicate_stdout_filters", "duplicate_stderr_filters"):
            assert flag.type is action.type, dest
    words = ["--duplicate-stdout-filters", "a,b,,c", SCRIPT]
    assert flags.parser().parse_args(words).duplicate_stdout_filters == ["a", "b,c"]
    assert get_args_parser().parse_args(words).duplicate_stdout_filters == ["a", "b,c"]


def test_the_streams_of_each_rank():
    for text in ("0", "3", "0:1,2:3"):
        theirs = to_map(Std.from_str(text), 4)
        assert [torchrun.streams(text)(rank) for rank in range(4)] == [int(theirs[rank]) for rank in range(4)]
    assert torchrun.streams("10:2")(10) == 2
    for text in ("4", "x", "0:4", "0:1,", ""):
        with pytest.raises(ValueError, match="must be 0, 1, 2 or 3"):
            torchrun.streams(text)


def test_an_agent_does_without_torch():
    code = "import sys, regrow.agent.agent; from regrow.agent.command_line import parse; parse(sys.argv[1:])"
    code += "; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code, SCRIPT], check=True, timeout=60)


def test_environment_of_torchrun(tmp_path, monkeypatch):
    monkeypatch.setenv("PET_NPROC_PER_NODE", "3")
    monkeypatch.setenv("PET_MAX_RESTARTS", "7")
    monkeypatch.setenv("PYTHON_EXEC", "python-of-mine")
    options = parse(tmp_path, SCRIPT)
    assert (options.nproc, options.max_restarts, options.command[0]) == (3, 7, "python-of-mine")
    monkeypatch.setenv("PET_STANDALONE", "0")
    monkeypatch.setenv("PET_MODULE", "1")
    assert parse(tmp_path, "pkg.mod").command[2:] == ("-m", "pkg.mod")


def test_what_is_refused_is_refused_from_the_environment_too(monkeypatch, capsys):
    monkeypatch.setenv("PET_RUN_PATH", "1")
    assert cli.main(["run", SCRIPT]) == 2
    assert "--run-path is not supported: give the script itself" in capsys.readouterr().err


def test_several_nodes(tmp_path, monkeypatch):
    monkeypatch.setenv("REGROW_TOKEN", "t")
    elastic = parse(tmp_path, "--nnodes=2:4", "--nproc-per-node=2", "--slots=3", "--node-rank=3", SCRIPT)
    assert (elastic.nnodes, elastic.most_nodes, elastic.nproc, elastic.slots) == (2, 4, 2, 3)
    assert not elastic.alone and not parse(tmp_path, "--standby", SCRIPT).alone and parse(tmp_path, SCRIPT).alone
    options = parse(tmp_path, "--nnodes=2:2", "--node-rank=1", "--rdzv-endpoint=host:123", SCRIPT)
    assert (options.nnodes, options.node_rank, options.endpoint, options.token) == (2, 1, ("host", 123), "t")
    assert parse(tmp_path, "--nnodes=2", "--rdzv-endpoint=host", SCRIPT).endpoint == ("host", 29400)
    assert parse(tmp_path, "--nnodes=2", "--rdzv-endpoint=[::1]:5", SCRIPT).endpoint == ("::1", 5)
    assert parse(tmp_path, "--nnodes=2", "--master-addr=m", SCRIPT).endpoint == ("m", 29500)


def test_a_token_file_is_for_its_owner(tmp_path, capsys):
    secret = tmp_path / "token"
    secret.write_text("from a file\n")
    secret.chmod(0o640)
    assert parse(tmp_path, f"--token-file={secret}", SCRIPT).token == "from a file"
    warning = f"regrow run: warning: --token-file {secret} can be read by other users: chmod 600 it\n"
    assert capsys.readouterr().err == warning
    secret.chmod(0o600)
    assert parse(tmp_path, f"--token-file={secret}", SCRIPT).token == "from a file"
    assert capsys.readouterr().err == ""


def test_one_address_for_all(tmp_path, monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert parse(tmp_path, SCRIPT).host_addr is None
    assert parse(tmp_path, "--interface=lo", SCRIPT).host_addr == "127.0.0.1"
    assert parse(tmp_path, "--local-addr=localhost", SCRIPT).host_addr in ("127.0.0.1", "::1")
    assert parse(tmp_path, "--interface=lo", "--host-addr=127.0.0.9", SCRIPT).host_addr == "127.0.0.9"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth7")
    assert parse(tmp_path, SCRIPT).host_addr == "127.0.0.1"
    assert parse(tmp_path, "--host-addr=127.0.0.9", SCRIPT).host_addr == "127.0.0.9"


def test_interfaces():
    there = {"lo": ("127.0.0.1", "::1"), "down0": (), "eth0": ("10.9.9.9", "fd00::9")}
    assert interfaces.addresses()["lo"][0] == "127.0.0.1"
    assert interfaces.choose(there, interface="eth0") == "10.9.9.9"
    assert interfaces.choose({"six": ("fd00::9",)}, interface="six") == "fd00::9"
    assert interfaces.choose(there, interface="lo", gloo_interfaces="eth0") == "127.0.0.1"
    listed = r"lo \(127.0.0.1, ::1\), down0 \(no address\), eth0 \(10.9.9.9, fd00::9\)"
    with pytest.raises(ValueError, match=f"--interface down0 has no address, this host has {listed}"):
        interfaces.choose(there, interface="down0")
    with pytest.raises(ValueError, match=f"GLOO_SOCKET_IFNAME nope: there is no such .*{listed}"):
        interfaces.choose(there, gloo_interfaces="nope")
    with pytest.raises(ValueError, match=r"127.0.0.1 and --interface eth0 contradict .* 10.9.9.9, fd00::9"):
        interfaces.choose(there, interface="eth0", host_addr="127.0.0.1")
    assert interfaces.outside(["127.0.0.1", "10.9.9.9", "10.9.9.8"], "10.9.9.9") == ["10.9.9.8"]


def test_store(tmp_path):
    assert parse(tmp_path, SCRIPT).store == ()
    options = parse(tmp_path, "--store", "etcd://a:1,b,[::1]:3", "--store-timeout", "4", SCRIPT)
    assert (options.store, options.store_timeout_s) == ((("a", 1), ("b", 2379), ("::1", 3)), 4.0)


def test_help(capsys):
    for words in ([], ["--help"]):
        assert cli.main(words) == 0
        out = capsys.readouterr().out
        assert "run" in out and "report" in out
    assert cli.main(["run", "--help"]) == 0
    assert "--spares" in capsys.readouterr().out
    assert cli.main(["dance"]) == 2


def test_as_a_module(tmp_path):
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "regrow", "run", "--nproc-per-node", "2", "--log-dir", str(tmp_path / "logs")]
    done = subprocess.run(
        [*command, SCRIPT, str(tmp_path), "{}"], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"hello from rank {rank} incarnation 0" for rank in (0, 1)]
