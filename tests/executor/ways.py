"""The executors, each with the hosts of its ranks: this host, two network namespaces with an agent
each, the pods of a Job, or the nodes of a real Slurm."""

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from agent.agent_stack import AgentStack
from agent.namespaces import inside, two_hosts
from executor.kubernetes_stack import KubernetesStack
from executor.slurm_cluster import slurm_cluster
from executor.slurm_stack import SlurmStack
from tandem.trainer.launch import DEFAULT_ENTRY

EXECUTORS = ("local", "hosts", "kubernetes", "slurm")
OF_RUNNER = (
    "TANDEM_EXECUTOR",
    "TANDEM_TRAINER_HOSTS",
    "TANDEM_HOST_ADDRESS",
    "TANDEM_JOB_TEMPLATE",
    "KUBECONFIG",
    "SLURM_CONF",
)


@contextmanager
def two_ranks(executor: str, root: Path) -> Iterator[dict[str, str]]:
    """The variables of a runner on this spool. Each job of the runner has two ranks, on one host if
    `executor` is local, and otherwise on two hosts."""
    variables = {
        "TANDEM_TRAINER_RANKS": "2",
        # the agents have the same number of threads, because this number decides the order of sums
        "OMP_NUM_THREADS": "1",
    }
    with ExitStack() as opened:
        if executor == "local":
            yield variables
            return
        if executor == "hosts":
            stack = AgentStack(root, entry=DEFAULT_ENTRY, TANDEM_HOST_ADDRESS="")
            names = opened.enter_context(two_hosts())
            stack.prefixes = {host: inside(name) for host, name in enumerate(names)}
            opened.enter_context(closing(stack))
            stack.start_agents()
        elif executor == "kubernetes":
            stack = KubernetesStack(root, entry=DEFAULT_ENTRY)
            opened.enter_context(closing(stack))
        else:
            cluster = opened.enter_context(slurm_cluster())
            stack = SlurmStack(cluster, root, entry=DEFAULT_ENTRY)
            opened.enter_context(closing(stack))
        environment = stack.environment
        yield variables | {name: environment[name] for name in OF_RUNNER if name in environment}
