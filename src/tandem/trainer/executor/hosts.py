"""Attempts on hosts where an agent already runs (`tandem rank-agent --follow`). No system places or
queues the attempts, and the GPUs stay with the agents' containers."""

from tandem.trainer.executor import Order
from tandem.trainer.executor.agents import AgentsExecution, AgentsExecutor


class HostsExecutor(AgentsExecutor):
    """An `Executor` for agents that already run. The agents find the attempt's order on the
    volume."""

    def start(self, order: Order) -> AgentsExecution:
        execution = AgentsExecution(order, self._settings, self._plan, self._stop)
        execution.start()
        return execution
