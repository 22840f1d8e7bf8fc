"""What the exporters say on real GPUs: `tandem up` on two of them, SFT and some RL steps, every
endpoint scraped.

    python3 bench/gpu_metrics.py --out DIRECTORY        (trainer on GPU 1, vLLM on GPU 0; vLLM and
                                                        megatron installed)

Leaves `scrape-<seconds>.<endpoint>.prom` every few seconds, `metrics.json` (GPU memory over time,
and what was given back after each job), and the logs. The model has Qwen3-0.6B's layers with a
vocabulary of bytes.
"""

import argparse
import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import tiny_model
import yes_no_maybe

PORTS = {"controller": 8080, "exporter": 9400, "vllm": 8000}
EVERY_SECONDS = 2.0


class Scraper(threading.Thread):
    """Keeps the text of every scrape."""

    def __init__(self, out: Path) -> None:
        super().__init__(daemon=True)
        self.out, self.rows, self.stop = out, [], threading.Event()
        self.begin = time.monotonic()

    def run(self) -> None:
        while not self.stop.wait(EVERY_SECONDS):
            at = time.monotonic() - self.begin
            for name, port in PORTS.items():
                try:
                    text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=5).text
                except httpx.HTTPError:
                    continue
                (self.out / f"scrape-{at:04.0f}.{name}.prom").write_text(text)
                if name == "exporter":
                    keep = (
                        "tandem_gpu_memory_used_bytes",
                        "tandem_torch_memory_",
                        "tandem_train_active",
                        "tandem_job_gpu_",
                        "tandem_rank_up",
                        "tandem_train_step ",
                    )
                    self.rows.append(
                        {
                            "seconds": round(at, 1),
                            "series": [line for line in text.splitlines() if line.startswith(keep)],
                        }
                    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rl-steps", type=int, default=6)
    parser.add_argument("--launch", default="torchrun")
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    root = Path("/tmp/gpu-metrics")
    tiny_model.write_tiny_qwen3(
        root / "models" / "m",
        hidden_size=1024,
        layers=28,
        heads=16,
        kv_heads=8,
        head_dim=128,
        ffn_size=3072,
    )
    os.environ |= {
        "TANDEM_ROOT": str(root),
        "TANDEM_BASE_MODEL": "models/m",
        "TANDEM_DEVICE": "cuda",
        "TANDEM_TRAINER_DEVICES": "1",
        "TANDEM_INFERENCE_DEVICES": "0",
        "TANDEM_LAUNCH": arguments.launch,
        "TANDEM_ENFORCE_EAGER": "1",
        "TANDEM_GPU_MEMORY_UTILIZATION": "0.5",
        "TANDEM_MAX_MODEL_LEN": "512",
        "TANDEM_MAX_LORA_RANK": "16",
        "TANDEM_API_KEY": secrets.token_urlsafe(16),
        "TANDEM_ADMIN_TOKEN": secrets.token_urlsafe(16),
    }
    scraper = Scraper(out)
    with (out / "up.log").open("wb") as log:
        stack = subprocess.Popen([sys.executable, "-m", "tandem", "up"], stdout=log, stderr=log)
        try:
            scraper.start()
            deadline = time.monotonic() + 200
            for url in (
                f"http://127.0.0.1:{PORTS['controller']}/readyz",
                f"http://127.0.0.1:{PORTS['vllm']}/health",
            ):
                while True:
                    try:
                        if httpx.get(url, timeout=3).status_code == 200:
                            break
                    except httpx.HTTPError:
                        pass
                    if stack.poll() is not None or time.monotonic() > deadline:
                        raise SystemExit(f"{url} does not answer; see {out / 'up.log'}")
                    time.sleep(0.5)
            print(f"ready after {time.monotonic() - scraper.begin:.0f} s", flush=True)
            report = asyncio.run(
                yes_no_maybe.train(
                    "gpu",
                    rl_steps=arguments.rl_steps,
                    samples=80,
                    tell=lambda what, row: print(
                        what, row.get("step"), row.get("reward"), flush=True
                    ),
                )
            )
            (out / "report.json").write_text(json.dumps(report, indent=1))
            time.sleep(8)  # the exporter's last look after the last job
        finally:
            scraper.stop.set()
            scraper.join(10)
            (out / "metrics.json").write_text(json.dumps(scraper.rows, indent=1))
            subprocess.run(
                ["tar", "-C", str(root), "-czf", str(out / "jobs.tgz"), "jobs"], check=False
            )
            stack.send_signal(signal.SIGTERM)
            print("stopped with", stack.wait(timeout=100), flush=True)


if __name__ == "__main__":
    main()
