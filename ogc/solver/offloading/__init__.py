"""Plans that offload: which values, and when they are away. The simulator's queues judge."""

from .choice import offloading, timed_candidate

__all__ = ["offloading", "timed_candidate"]
