"""The environments of a run over several devices (--shard-envs): the numbers are those of one device, to rounding.

The devices are those that XLA makes of one CPU.
"""

import re
import signal
from pathlib import Path

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


@pytest.mark.parametrize("name", ONE_QUICK)
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

    # Nothing but sums goes from device to device: of gradients, once for a minibatch, and of single numbers.
    programs = [file.read_text() for file in (tmp_path / "dump").glob("*after_optimizations.txt")]
    training = max(programs, key=len)
    found = re.findall(r"= (.+?) (all-\w+|collective-\w+|reduce-scatter)(?:-start)?\(", training)
    large = [(shape, kind) for shape, kind in found if re.search(r"\[[\d,]{2,}\]", shape)]
    if name != DRAWS_IN_TURN:
        assert {kind for _, kind in found} == {"all-reduce"} and len(large) == 1, found


def test_devices_that_cannot_share_a_minibatch_are_left_out_and_one_environment_cannot_be_shared(script, tmp_path):
    """Six devices: two for the seeds, and of three for the four environments of a minibatch, one."""
    process = script(f"{command('pqn_ffm', num_envs=8)} --run-dir runs", env=devices(6))
    assert process.returncode == 0 and "2 of 6" in process.stdout and "1 seeds, 8 env" in process.stdout, process.stderr
    run, _ = sorted((tmp_path / "runs").iterdir())
    evaluated = script(f"pqn_ffm.py --evaluate {run}", env=devices(3))
    assert evaluated.returncode == 0 and "evaluation" in evaluated.stdout, evaluated.stderr

    process = script(f"{command('pqn_ffm', num_minibatches=4)} --run-dir none", env=devices(4))
    assert_one_line_error(process, "--shard-envs True", "one environment", "--num-minibatches")
    assert not (tmp_path / "none").exists()
