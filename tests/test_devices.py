"""A run over several devices, and over several processes: the numbers are those of one device, and nothing is lost.

The devices are those that XLA makes of one CPU. Processes find each other on this machine, through the variables in
which Slurm tells each task of a job who it is.
"""

import importlib
import json
import os
import re
import signal
import socket
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import strike
from test_runs import assert_one_line_error, checkpoint, points
from test_scripts import ALL

# On a CPU the arcade's pictures are drawn one environment after the other, by every device for all: not on a GPU.
DRAWS_IN_TURN = "pqn_arcade_cnn"


def command(name: str, **changes) -> str:
    """A small run of three updates, whose minibatches have two environments."""
    args = ALL[name] | {"num_envs": 4, "num_minibatches": 2} | changes
    args["total_timesteps"] = 3 * args["num_envs"] * args["num_steps"]
    flags = [f"--{flag.replace('_', '-')}" + ("" if value is True else f" {value}") for flag, value in args.items()]
    return f"{name}.py --shard-envs --num-seeds 2 --checkpoint-every 1000 {' '.join(flags)}"


def devices(number: int, dump: Path | None = None) -> dict[str, str]:
    """The environment that makes so many of a CPU, and in which XLA writes the programs that it makes into a folder."""
    flags = f"--xla_force_host_platform_device_count={number}"
    if dump is None:
        return {"XLA_FLAGS": flags}
    cache = {"JAX_COMPILATION_CACHE_DIR": str(dump / "cache")}  # a program that is loaded is not written
    return cache | {"XLA_FLAGS": f"{flags} --xla_dump_to={dump} --xla_dump_hlo_as_text"}


ONE_QUICK = [pytest.param(name, marks=[pytest.mark.slow] * (name != "pqn_ffm")) for name in ALL]


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_a_run_whose_environments_lie_over_devices_is_that_of_one(script, tmp_path, name):
    """It is stopped on four devices, two for the seeds and two for their environments, and goes on on two."""
    alone = script(f"{command(name)} --run-dir alone", env=devices(1))
    assert alone.returncode == 0 and "2 seeds, 4 environments" in alone.stdout, alone.stderr
    update = ALL[name]["num_steps"] * 4
    first = f"args[1].step == {update} and len(args[1].summary.value) > 0"
    patch = strike(signal.SIGTERM, "tensorboardX.event_file_writer:EventsWriter", "write_event", first)
    stopped = script(f"{command(name)} --run-dir four", env=devices(4, tmp_path / "dump"), patch=patch)
    assert stopped.returncode == 143 and "1 seeds, 2 environments" in stopped.stdout, stopped.stderr
    runs = sorted((tmp_path / "four").iterdir())
    resumed = script(f"{name}.py --resume {runs[0]}", env=devices(2))
    assert resumed.returncode == 0, resumed.stderr

    others = sorted((tmp_path / "alone").iterdir())
    one, several = checkpoint(others[0]).state, checkpoint(runs[0]).state
    assert one.keys() == several.keys()
    for path in one:
        if one[path].dtype.kind == "f":
            np.testing.assert_allclose(several[path], one[path], rtol=1e-4, atol=1e-5, err_msg=path)
        else:
            np.testing.assert_array_equal(several[path], one[path], err_msg=path)
    for run, other in zip(runs, others, strict=True):
        there, here = points(other), points(run)
        steps = [step for step, _ in there["losses/grad_norm"]]
        assert [step for step, _ in here["losses/grad_norm"]] == steps == [update, 2 * update, 3 * update]

    # From device to device go sums, of gradients once for a minibatch and of single numbers, and what is logged.
    programs = [file.read_text() for file in (tmp_path / "dump").glob("*after_optimizations.txt")]
    training = max(programs, key=len)
    found = re.findall(r"= (.+?) (all-\w+|collective-\w+|reduce-scatter)(?:-start)?\(", training)
    if name != DRAWS_IN_TURN:
        large = [kind for shape, kind in found if re.search(r"\[[\d,]{2,}\]", shape)]
        assert large == ["all-reduce"], found
        gathered = {shape.split("{")[0] for shape, kind in found if kind != "all-reduce"}
        assert gathered <= {"f32[2]", "s32[2]"}, "a number of each of the two seeds"


@pytest.mark.slow
def test_devices_that_cannot_share_a_minibatch_are_left_out(script, tmp_path):
    """Six devices: two for the seeds, and of three for the four environments of a minibatch, one."""
    process = script(f"{command('pqn_ffm', num_envs=8)} --run-dir runs", env=devices(6))
    assert process.returncode == 0 and "2 of 6" in process.stdout and "1 seeds, 8 env" in process.stdout, process.stderr
    run, _ = sorted((tmp_path / "runs").iterdir())
    evaluated = script(f"pqn_ffm.py --evaluate {run}", env=devices(3))
    assert evaluated.returncode == 0 and "evaluation" in evaluated.stdout, evaluated.stderr


def test_one_environment_of_a_minibatch_cannot_be_shared(script, tmp_path):
    process = script(f"{command('pqn_ffm', num_minibatches=4)} --run-dir none", env=devices(4))
    assert_one_line_error(process, "--shard-envs True", "one environment", "--num-minibatches")
    assert not (tmp_path / "none").exists()


# ---------------------------------------------------------------------------------------------------------- processes
@pytest.fixture
def together(script, tmp_path):
    """together(command) runs it in two processes, which are one job, and returns both when they have ended.

    Each works in a folder of its own; what they share is tmp_path.
    """

    def run(command: str, number_of_devices: int = 1, **options):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        env = {"JAX_COORDINATOR_ADDRESS": address, "SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "localhost"}
        env |= {"SLURM_NTASKS": "2", "SLURM_LOCALID": "0"} | devices(number_of_devices)
        started = []
        for i in range(2):
            folder = tmp_path / f"process{i}"
            folder.mkdir(exist_ok=True)
            own = {"env": env | {"SLURM_PROCID": str(i)}, "cwd": folder, "wait": False}
            started.append(script(f"{command} --distributed", **own, **options))
        for process in started:
            process.stdout, process.stderr = process.communicate(timeout=300)
        return started

    return run


UPDATE = ALL["pqn_ffm"]["num_envs"] * ALL["pqn_ffm"]["num_steps"]


def seeds_command(updates: int) -> str:
    """A small run of two seeds, which two processes can share."""
    flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in ALL["pqn_ffm"].items())
    return f"pqn_ffm.py {flags} --num-seeds 2 --checkpoint-every 1000 --total-timesteps {updates * UPDATE}"


def logged(process: int, update: int) -> str:
    """The moment in which a process logs the scalars of an update."""
    moment = f"args[1].step == {update * UPDATE} and len(args[1].summary.value) > 0"
    return f"os.environ['SLURM_PROCID'] == '{process}' and {moment}"


EVENTS = "tensorboardX.event_file_writer:EventsWriter", "write_event"


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """alone(script): the runs that one process makes of seeds_command(6), which are made once."""
    folder = tmp_path_factory.mktemp("alone") / "runs"

    def run(script) -> list[Path]:
        if not folder.exists():
            process = script(f"{seeds_command(6)} --run-dir {folder}")
            assert process.returncode == 0, process.stderr
        return sorted(folder.iterdir())

    return run


def assert_same_runs(runs: list[Path], others: list[Path]):
    """Bit for bit: a seed's arithmetic is done whole, on one device, wherever it is done."""
    one, other = checkpoint(runs[0]).state, checkpoint(others[0]).state
    assert one.keys() == other.keys()
    for path in one:
        np.testing.assert_array_equal(one[path], other[path], err_msg=path)
    for run, other in zip(runs, others, strict=True):
        results = [json.loads((folder / "eval.json").read_text()) for folder in (run, other)]
        assert results[0]["returns"] == results[1]["returns"]
        found, expected = points(run), points(other)
        found.pop("charts/SPS"), expected.pop("charts/SPS")
        assert found == expected and len(found) > 8


@pytest.mark.slow
def test_two_processes_share_the_seeds_of_a_run(script, alone, together, tmp_path):
    """The first one speaks, and writes the checkpoint of both."""
    first, second = together(f"{seeds_command(6)} --run-dir {tmp_path / 'runs'}")
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert "2 of 2" in first.stdout and re.search("^processes +2$", first.stdout, re.MULTILINE)
    assert "run folder" not in second.stdout
    assert_same_runs(sorted((tmp_path / "runs").iterdir()), alone(script))


@pytest.mark.slow
def test_processes_stop_together_and_go_on_as_one_or_as_two(script, alone, together, tmp_path):
    """The second one gets the signal."""
    run_dir = tmp_path / "runs"
    patch = strike(signal.SIGTERM, *EVENTS, logged(process=1, update=2))
    first, second = together(f"{seeds_command(6)} --run-dir {run_dir}", patch=patch)
    assert (first.returncode, second.returncode) == (143, 143), first.stderr + second.stderr
    assert f"go on with --resume {run_dir}" in first.stdout
    runs = sorted(run_dir.iterdir())
    assert [run.name.split("__")[3] for run in runs] == ["1", "2"]
    assert [(run / "checkpoint.msgpack").exists() for run in runs] == [True, False]
    assert checkpoint(runs[0]).update == 2
    patch = strike(signal.SIGINT, *EVENTS, f"args[1].step == {4 * UPDATE} and len(args[1].summary.value) > 0")
    assert script(f"pqn_ffm.py --resume {runs[1]}", patch=patch).returncode == 130
    assert checkpoint(runs[0]).update == 4
    for process in together(f"pqn_ffm.py --resume {runs[0]}"):
        assert process.returncode == 0 and process.stderr == "", process.stderr
    assert_same_runs(runs, alone(script))
    for process in together(f"pqn_ffm.py --resume {runs[0]}"):
        assert process.returncode == 0 and "compile time" not in process.stdout, process.stderr


@pytest.mark.slow
def test_each_process_keeps_the_folders_of_its_own_seeds(together, tmp_path):
    """Where they share no disk, too. Only what goes on with a run needs all of its folders in one place."""
    for process in together(f"{seeds_command(2)} --run-dir runs"):
        assert process.returncode == 0 and process.stderr == "", process.stderr
    for i, files in enumerate([{"checkpoint.msgpack"}, set()]):
        (run,) = (tmp_path / f"process{i}" / "runs").iterdir()
        assert run.name.split("__")[3] == str(i + 1)
        names = {file.name for file in run.iterdir()}
        assert names >= files | {"config.json", "eval.json"} and ("checkpoint.msgpack" in names) == (i == 0)
        assert len(points(run)["losses/td_loss"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_when_a_process_is_killed_the_other_ends_and_the_run_goes_on(script, alone, together, tmp_path, killed):
    """In one line; where the first one dies, whom the others report to, JAX may be quicker, with words of its own."""
    command = seeds_command(6).replace("--checkpoint-every 1000", "--checkpoint-every 0")
    patch = strike(signal.SIGKILL, *EVENTS, logged(killed, update=4))
    processes = together(f"{command} --run-dir {tmp_path / 'runs'}", patch=patch)
    other = processes[1 - killed]
    assert processes[killed].returncode == -signal.SIGKILL and other.returncode not in (0, None)
    if killed == 1:
        assert_one_line_error(other, "another process has ended", "--resume", code=1)
    runs = sorted((tmp_path / "runs").iterdir())
    assert checkpoint(runs[0]).update == 3
    assert script(f"pqn_ffm.py --resume {runs[0]}").returncode == 0
    assert_same_runs(runs, alone(script))


@pytest.mark.slow
def test_when_a_process_fails_it_says_why_and_the_other_ends_with_a_line(together):
    fault = """
import os
if os.environ.get("SLURM_PROCID") == "1":
    from tensorboardX.event_file_writer import EventsWriter
    def write_event(self, event, write=EventsWriter.write_event):
        if event.step > 200:
            raise ZeroDivisionError("planted")
        write(self, event)
    EventsWriter.write_event = write_event
"""
    first, second = together(f"{seeds_command(6)} --run-dir runs", patch=fault)
    assert second.returncode == 1 and second.stderr.endswith("ZeroDivisionError: planted\n")
    assert_one_line_error(first, "another process has ended", code=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_processes_that_share_the_environments_make_the_run_of_one(script, together, tmp_path, name):
    """Two processes of two devices each, for one seed: the first keeps its folder. To rounding."""
    changes = {"num_envs": 8, "num_minibatches": 2}
    line = f"{command(name, **changes).replace('--num-seeds 2', '--num-seeds 1')} --run-dir {tmp_path}"
    assert script(f"{line}/alone", env=devices(1)).returncode == 0
    for process in together(f"{line}/two", number_of_devices=2):
        assert process.returncode == 0, process.stderr
    (run,), (other,) = (tmp_path / "two").iterdir(), (tmp_path / "alone").iterdir()
    one, several = checkpoint(other).state, checkpoint(run).state
    assert one.keys() == several.keys()
    for path in one:
        np.testing.assert_allclose(several[path], one[path], rtol=1e-4, atol=1e-5, err_msg=path)


def test_what_processes_cannot_share_and_a_cluster_that_is_none_are_one_line(script, together, tmp_path):
    nobody = {name: None for name in os.environ if name.startswith(("SLURM", "OMPI", "JAX_COORD"))}
    process = script(f"{seeds_command(2)} --run-dir none --distributed", env=nobody)
    assert_one_line_error(process, "--distributed", "no cluster")
    for process in together(f"{seeds_command(2)} --seed 3 --num-seeds 3 --run-dir {tmp_path / 'none'}"):
        assert_one_line_error(process, "2 processes", "--num-seeds 3")
    assert not (tmp_path / "none").exists()


# --------------------------------------------------------------------------------------------------------------- GPUs
@pytest.mark.parametrize("name", ONE_QUICK)
def test_the_program_of_four_gpus_can_be_made_without_one(name, monkeypatch):
    """As far as XLA's input, and in an accelerator's forms: fewer loops over time, and XLA's convolutions."""
    module = importlib.import_module(name)
    args = module.Args(**ALL[name] | {"num_envs": 8, "total_timesteps": 10_000, "shard_envs": True})
    module.check_args(args)
    mesh = jax.sharding.AbstractMesh((1, 4), ("seeds", "envs"))
    specs = {"in_specs": jax.P("seeds"), "out_specs": jax.P("seeds"), "axis_names": {"seeds"}, "check_vma": False}
    texts = {}
    for backend in "cpu", "gpu":
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        train = module.make_train(args)
        state = jax.eval_shape(jax.vmap(train.init), jnp.zeros(2, jnp.int32))
        iteration = jax.jit(jax.shard_map(jax.vmap(train.train_iteration), mesh=mesh, **specs))
        platform = {"cpu": "cpu", "gpu": "cuda"}[backend]
        texts[backend] = iteration.trace(state).lower(lowering_platforms=(platform,)).as_text()
    loops = {backend: text.count("stablehlo.while") for backend, text in texts.items()}
    assert loops["gpu"] < loops["cpu"], loops
    assert ("stablehlo.convolution" in texts["gpu"]) == (name == "pqn_arcade_cnn")
    assert texts["gpu"].count("sdy.manual_computation") == 2, "of each device's seeds, and of its environments"
