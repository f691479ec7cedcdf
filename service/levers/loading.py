"""Where batches are made. Tokens are read once, from the job's cache; what is left is arranging and padding them."""

from service.levers.base import Choice, Lever, Need


def cores(workers: int) -> Need:
    """A core for each worker and two to train with; fewer would time each other."""
    return Need(
        lambda facts: facts.cores >= workers + 2,
        f"needs {workers + 2} cores, or the workers take them from the training; name it under search.fixed or "
        "search.levers to try it all the same",
        soft=True,
    )


LEVER = Lever(
    name="loading",
    summary="Where batches are made and how far ahead; the time that the device waits for them is in every timing.",
    baseline="ahead",
    source="https://docs.pytorch.org/docs/stable/data.html",
    stage="loading",
    choices=(
        Choice(
            "ahead",
            "in the training process, the next step's while the device computes, in pinned memory for a GPU",
            function="made_here",
        ),
        Choice(
            "unpinned",
            "the same in ordinary memory",
            searched=False,
            function="made_here",
            options={"pins": False},
            training_arguments={"dataloader_pin_memory": False},
        ),
        Choice(
            "workers-2",
            "by two processes that last, two steps ahead each",
            needs=(cores(2),),
            function="made_by_workers",
            options={"workers": 2},
            training_arguments={
                "dataloader_num_workers": 2,
                "dataloader_prefetch_factor": 2,
                "dataloader_persistent_workers": True,
            },
        ),
        Choice(
            "workers-4",
            "by four processes",
            needs=(cores(4),),
            function="made_by_workers",
            options={"workers": 4},
            training_arguments={
                "dataloader_num_workers": 4,
                "dataloader_prefetch_factor": 2,
                "dataloader_persistent_workers": True,
            },
        ),
    ),
)
