"""Where batches are made. Tokens are read once, from the job's cache; what is left is arranging and padding them."""

from service.levers.base import Choice, Lever, Need


def cores(workers: int) -> Need:
    """A CPU core for each loading process and two to train with: with fewer, loading takes time from the training."""
    return Need(
        lambda facts: facts.cores >= workers + 2,
        f"needs {workers + 2} cores or more; of fewer, workers take some from the training: name it under "
        "search.fixed or search.levers to try it all the same",
        soft=True,
        slow=True,
    )


def by_workers(count: int, summary: str) -> Choice:
    """The choice of making batches in that many processes of their own."""
    return Choice(
        f"workers-{count}",
        summary,
        needs=(cores(count),),
        function="made_by_workers",
        options={"workers": count},
        training_arguments={
            "dataloader_num_workers": count,
            "dataloader_prefetch_factor": 2,
            "dataloader_persistent_workers": True,
        },
    )


LEVER = Lever(
    name="loading",
    summary="Where batches are made and how far ahead; the time that the device waits for them is in every timing.",
    baseline="ahead",
    source="https://docs.pytorch.org/docs/stable/data.html",
    order=170,
    touches_memory=False,
    stage="loading",
    families=(("workers-2", "workers-4"),),
    choices=(
        Choice(
            "ahead",
            "in the training process, the next step's while the device computes, in pinned memory for a GPU",
        ),
        Choice(
            "unpinned",
            "the same in ordinary memory",
            searched=False,
            options={"pins": False},
            training_arguments={"dataloader_pin_memory": False},
        ),
        by_workers(2, "by two processes that last, two steps ahead each"),
        by_workers(4, "by four processes"),
    ),
)
