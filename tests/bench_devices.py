"""What docs/scale.md says in numbers: seconds and bytes of an update, and what several devices cost.

    python tests/bench_devices.py links     # each script's update at the published setting, and what its gradients take
    python tests/bench_devices.py weak      # the work of one device, on each of 1, 2 and 4, and in 1 and 2 processes

`links` measures the seconds of an update and counts the bytes of its gradients; the times of links are computed from
these, for the speeds in LINKS. `weak` forces XLA to make several devices of one CPU, which share its cores, as do
processes on one machine: what is measured is what sharing costs, not what more devices bring.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# A name, devices, bytes per second of a device's link in each direction, and seconds that a message takes to start.
LINKS = [
    ("8, NVLink", 8, 300e9, 5e-6),
    ("8, PCIe", 8, 25e9, 5e-6),
    ("16, 100 Gb", 16, 12.5e9, 20e-6),
    ("16, 10 Gb", 16, 1.25e9, 50e-6),
]
# A command, its updates that are measured, environment steps of an update, and gradients of an update.
AGENTS = [
    ("pqn_ffm.py --env RepeatPreviousEasy --memory ffm", 40, 16 * 128, 64),
    ("pqn_frozen_rnn.py --env RepeatPreviousEasy --memory gru", 20, 16 * 128, 64),
    ("pqn_frozen_rnn.py --env RepeatPreviousEasy --memory lru", 40, 16 * 128, 64),
    ("ppo_memorychain.py --delay 128 --memory gru", 2, 64 * 1024, 64),
    ("ppo_memorychain.py --delay 128 --memory lru", 2, 64 * 1024, 64),
    ("ppo_playground.py --env BallInCup --memory gru", 20, 16 * 128, 16),
    ("ppo_playground.py --env BallInCup --memory lru", 20, 16 * 128, 16),
    ("pqn_arcade_cnn.py --env BattleShipEasy --memory lru", 2, 16 * 128, 16),
]
WEAK = "pqn_ffm.py --env RepeatPreviousEasy --frozen --num-minibatches 4"
WEAK_UPDATES, WEAK_ENVS, WEAK_STEPS = 40, 16, 128  # environments and steps of one device
SHAPES = [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2)]  # processes, devices of each


def run(command: str, processes: int = 1, devices: int = 1) -> tuple[dict, dict]:
    """config.json and eval.json of the first seed of this run. Ends the program if it fails."""
    env = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}", "JAX_PLATFORMS": "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        script, *flags = f"{command} --eval-episodes 1 --checkpoint-every 1000 --run-dir {folder}".split()
        if processes > 1:
            flags.append("--distributed")
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                env["JAX_COORDINATOR_ADDRESS"] = f"127.0.0.1:{free.getsockname()[1]}"
            env |= {"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "localhost", "SLURM_LOCALID": "0"}
            env["SLURM_NTASKS"] = str(processes)
        started = []
        for i in range(processes):
            own = env | {"SLURM_PROCID": str(i)} if processes > 1 else env
            started.append(
                subprocess.Popen([sys.executable, ROOT / script, *flags], env=own, stdout=subprocess.DEVNULL)
            )
        if any([process.wait() for process in started]):
            sys.exit(f"{command} failed")
        (first,) = Path(folder).glob("*__1__*")
        return json.loads((first / "config.json").read_text()), json.loads((first / "eval.json").read_text())


def links():
    """Prints a row for each agent. A ring all-reduce over D devices sends 2 (D - 1) / D of the bytes from each device,
    in 2 (D - 1) messages."""
    names = " | ".join(name for name, *_ in LINKS)
    print(f"| script, memory | gradient MB | all-reduces | MB an update | update s (measured) | {names} |")
    print("|---" * (5 + len(LINKS)) + "|")
    for command, updates, steps, all_reduces in AGENTS:
        for frozen in "", " --frozen":
            config, result = run(f"{command}{frozen} --total-timesteps {updates * steps}")
            gradient = 4 * config["parameters"]["all"]["trainable"]  # bytes
            milliseconds = []
            for _, devices, bandwidth, latency in LINKS:
                rounds = 2 * (devices - 1)
                seconds = all_reduces * (gradient * rounds / devices / bandwidth + rounds * latency)
                milliseconds.append(f"{1000 * seconds:.3g}")
            label = f"{config['script']}, {config['args']['memory']}{frozen.replace(' --', ' ')}"
            numbers = f"{gradient / 1e6:.2f} | {all_reduces} | {all_reduces * gradient / 1e6:.0f}"
            print(f"| {label} | {numbers} | {steps / result['SPS']:.3f} | {' | '.join(milliseconds)} |", flush=True)


def weak():
    """Prints steps per second of the whole, with one seed, or 16 environments, of each device."""
    print("| shared | processes | devices of each | SPS | ratio |\n|---|---|---|---|---|")
    for way in "seeds", "environments":
        alone = None
        for processes, devices in SHAPES:
            number = processes * devices
            flags = {"seeds": f"--num-seeds {number}", "environments": "--shard-envs"}[way]
            envs = WEAK_ENVS * (number if way == "environments" else 1)
            flags += f" --num-envs {envs} --total-timesteps {WEAK_UPDATES * envs * WEAK_STEPS}"
            sps = run(f"{WEAK} {flags}", processes, devices)[1]["SPS"]
            alone = alone or sps
            print(f"| {way} | {processes} | {devices} | {sps:,.0f} | {sps / alone:.2f} |", flush=True)


if __name__ == "__main__":
    {"links": links, "weak": weak}[sys.argv[1]]()
