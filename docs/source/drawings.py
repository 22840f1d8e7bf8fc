"""`python -m docs.source.drawings` makes the drawings in docs/pictures/."""

from collections.abc import Callable
from html import escape
from pathlib import Path

PICTURES = Path(__file__).parents[1] / "pictures"
FILLS = {
    "program": "#ffffff",
    "container": "#eef2fb",
    "volume": "#fdf1d6",
    "question": "#e4e9f7",
    "answer": "#e3f3e3",
    "failure": "#fbe4e1",
}
INK, FAINT = "#1c2333", "#5b6478"
LINE_HEIGHT = 16

Point = tuple[float, float]


class Drawing:
    """Boxes, arrows and texts on a white sheet, in pixels from the upper left corner."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"'
            ' font-family="system-ui, sans-serif" font-size="13">\n'
            f"<title>{escape(title)}</title>\n"
            '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7"'
            ' markerHeight="7" orient="auto-start-reverse">'
            f'<path d="M0 0L10 5L0 10z" fill="{FAINT}"/></marker></defs>\n'
            f'<rect width="{width}" height="{height}" rx="8" fill="#fff"/>\n'
        )
        self._parts: list[str] = []

    def box(
        self, kind: str, left: int, top: int, width: int, height: int, title: str, *lines: str
    ) -> None:
        """Adds a box with its texts. The texts are at the top left in a container's box, and in the
        middle of other boxes."""
        self._parts.append(
            f'<rect x="{left}" y="{top}" width="{width}" height="{height}" rx="6"'
            f' fill="{FILLS[kind]}" stroke="{FAINT}"/>'
        )
        if kind == "container":
            self.text(left + 12, top + 20, title, bold=True)
            for number, line in enumerate(lines, 1):
                self.text(left + 12, top + 20 + number * LINE_HEIGHT, line, faint=True)
            return
        middle = left + width / 2
        first = top + height / 2 + 5 - len(lines) * LINE_HEIGHT / 2
        self.text(middle, first, title, bold=True, anchor="middle")
        for number, line in enumerate(lines, 1):
            self.text(middle, first + number * LINE_HEIGHT, line, anchor="middle", faint=True)

    def arrow(
        self, *points: Point, label: str = "", at: Point | None = None, both: bool = False
    ) -> None:
        """Adds an arrow through `points`, with `label` at the point `at`."""
        path = "L".join(f"{x:g} {y:g}" for x, y in points)
        start = ' marker-start="url(#head)"' if both else ""
        self._parts.append(
            f'<path d="M{path}" fill="none" stroke="{FAINT}" stroke-width="1.4"{start}'
            ' marker-end="url(#head)"/>'
        )
        if at:
            self.text(*at, label, faint=True)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        bold: bool = False,
        faint: bool = False,
        anchor: str = "start",
    ) -> None:
        style = f' fill="{FAINT if faint else INK}"' + (' font-weight="600"' if bold else "")
        placed = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self._parts.append(f'<text x="{x:g}" y="{y:g}"{placed}{style}>{escape(text)}</text>')

    def svg(self) -> str:
        return self._head + "\n".join(self._parts) + "\n</svg>\n"


def containers() -> str:
    """The drawing of the three containers, their volume, and the data that they exchange."""
    it = Drawing(860, 510, "Tandem's containers and the volume that they share")
    it.box("program", 250, 14, 360, 46, "client", "Python, curl, tandem, any OpenAI SDK")
    it.arrow((330, 60), (330, 118), label="jobs, events: HTTP", at=(196, 92))
    it.arrow((560, 60), (560, 118), label="sampling: model <run>@<step>", at=(570, 92))
    it.box("container", 40, 120, 360, 100, "controller", "no GPU")
    it.box("program", 160, 136, 220, 66, "HTTP API", "prepares data, queues jobs")
    it.box("container", 440, 120, 380, 130, "inference", "GPU 1")
    it.box("program", 540, 132, 260, 40, "vLLM")
    it.box("program", 540, 202, 260, 40, "publisher")
    it.arrow((580, 202), (580, 174), label="loads and verifies a step", at=(590, 192))
    it.box(
        *("volume", 40, 292, 780, 64, "the spool: one shared volume"),
        "jobs · packed batches · checkpoints · events",
    )
    it.arrow((270, 204), (270, 290), label="jobs, events", at=(280, 262), both=True)
    it.arrow((620, 290), (620, 244), label="new checkpoints", at=(632, 275))
    it.box("container", 40, 398, 780, 98, "trainer", "GPU 0")
    it.box("program", 160, 416, 200, 64, "runner", "no CUDA; claims jobs")
    it.box("program", 480, 416, 320, 64, "ranks", "start for a job; exit after it, 0 bytes stay")
    it.arrow((260, 414), (260, 358), label="jobs", at=(272, 384), both=True)
    it.arrow((360, 448), (478, 448), label="starts, watches", at=(368, 440))
    it.arrow((560, 358), (560, 414), label="a batch", at=(500, 384))
    it.arrow((660, 416), (660, 358), label="a checkpoint, events", at=(672, 384))
    return it.svg()


def job() -> str:
    """The drawing of a job, from its submission to the step that vLLM serves."""
    it = Drawing(900, 390, "A job's life, from its submission to the step that vLLM serves")
    top = 24
    it.box("program", 20, top, 150, 74, "submission", "packed data; made", "by one rename")
    it.box("question", 220, top, 150, 74, "queued", "waits for the run's", "earlier jobs")
    it.box("question", 460, top, 150, 74, "running", "attempt 1, 2, …;", "a lease is renewed")
    it.box("answer", 720, top, 160, 74, "succeeded", "checkpoint N + 1,", "made by one rename")
    it.arrow((170, 61), (218, 61))
    it.arrow((370, 61), (458, 61), label="claimed", at=(388, 53))
    it.arrow((610, 61), (718, 61), label="committed", at=(630, 53))
    it.box("container", 330, 148, 410, 100, "the ranks of an attempt")
    for left, width, title in (
        *((342, 84, "start"), (434, 92, "load step N"), (534, 92, "train")),
        (634, 94, "stage N + 1"),
    ):
        it.box("program", left, 180, width, 54, title)
    it.arrow((535, 98), (535, 146))
    it.box(
        "failure",
        20,
        162,
        220,
        74,
        "fence",
        "staged files lose their names:",
        "the attempt can't commit",
    )
    it.arrow((330, 199), (242, 199), label="crash, hang", at=(250, 191))
    it.arrow((130, 162), (130, 126), (295, 126), (295, 100), label="tried again", at=(140, 120))
    it.box(
        "failure",
        20,
        300,
        220,
        64,
        "failed",
        "bad input, or no attempts left;",
        "the reason is kept",
    )
    it.arrow((130, 236), (130, 298))
    it.box("failure", 300, 300, 200, 64, "cancelled", "by a user, at any moment")
    it.arrow((400, 248), (400, 298))
    it.box(
        "answer",
        660,
        300,
        220,
        64,
        "served as <run>@<N + 1>",
        "vLLM's log-probs agree",
        "with the trainer's",
    )
    it.arrow((830, 98), (830, 298), label="publisher", at=(762, 276))
    return it.svg()


def modes() -> str:
    """The drawing of the decision tree of docs/modes.md."""
    it = Drawing(930, 440, "Which mode do I need? One decision tree")
    questions = ["1. How many GPUs?", "2. What is trained?", "3. What is sampled?", "4. Where?"]
    answers = [
        [
            ("none", "TANDEM_DEVICE=cpu"),
            ("one for both", "TANDEM_GPU_MODE=shared"),
            ("one or more for each", "TANDEM_GPU_MODE=dedicated"),
        ],
        [
            ("adapters (LoRA)", "the default: go to 3"),
            ("all weights: go to 4", "TANDEM_WEIGHTS=merged", "TANDEM_TRANSPORT=volume or nccl"),
        ],
        [
            ("several runs or steps; Tinker's API", "TANDEM_WEIGHTS=adapter (default)"),
            ("one run's newest step, fast", "TANDEM_WEIGHTS=merged"),
        ],
        [
            ("one host", "tandem up, or docker compose"),
            ("a cluster", "the Helm chart"),
        ],
    ]
    for row, (question, of_question) in enumerate(zip(questions, answers, strict=True)):
        top = 20 + row * 115
        it.box("question", 20, top, 170, 70, question)
        width = (690 - 14 * (len(of_question) - 1)) // len(of_question)
        for number, (answer, *settings) in enumerate(of_question):
            left = 220 + number * (width + 14)
            it.box("answer", left, top, width, 70, answer, *settings)
        it.arrow((190, top + 35), (218, top + 35))
        if row < len(questions) - 1:
            it.arrow((105, top + 70), (105, top + 113))
    return it.svg()


DRAWINGS: dict[str, Callable[[], str]] = {"containers": containers, "job": job, "modes": modes}


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    for name, draw in DRAWINGS.items():
        (PICTURES / f"{name}.svg").write_text(draw())


if __name__ == "__main__":
    main()
