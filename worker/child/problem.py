"""Errors of the child that carry one sentence for the user."""


class JobProblem(Exception):
    """The job itself cannot run (a missing column, an unknown model): its user has to change something."""


class TrialProblem(Exception):
    """This configuration cannot run here; others may."""


class Unstable(Exception):
    """The numbers went wrong: NaN, infinite, a zero gradient, or away from the reference."""


class Unsafe(Exception):
    """Memory will not last: it grows, or the allocator lives from hand to mouth. A smaller batch may hold."""
