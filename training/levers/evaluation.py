"""Contexts around an evaluation. A context yields a scoring function where completions are generated, else None."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from training.samples import IGNORED, Sample

LONGEST_GENERATED = 128  # tokens
Score = Callable[[Sequence[Sample], int, int, Any], dict[str, float]]


@contextlib.contextmanager
def in_sixteen_bits(model: Any) -> Iterator[Score | None]:
    """Cast the fp32 weights to bf16 within the context; afterwards the model has its fp32 weights again."""
    kept = {one: one.data for one in model.parameters() if one.dtype is torch.float32}
    for parameter, weight in kept.items():
        parameter.data = weight.to(torch.bfloat16)
    try:
        yield None
    finally:
        for parameter, weight in kept.items():
            parameter.data = weight


@contextlib.contextmanager
def with_generation(model: Any, generated: int) -> Iterator[Score | None]:
    """The model as it is; scores `generated` completions by BLEU (sacreBLEU, Post 2018) and ROUGE-L (Lin 2004)."""

    def score(samples: Sequence[Sample], size: int, most: int, tokenizer: Any) -> dict[str, float]:
        """Scores in percent, by batches of `size`, of `most` tokens with the prompt; {} if no sample has a prompt."""
        began = time.perf_counter()
        import sacrebleu
        from rouge_score import rouge_scorer

        pairs = [asked_and_answer(sample) for sample in samples[:generated]]
        pairs = sorted((pair for pair in pairs if all(pair)), key=lambda pair: len(pair[0]))
        if not pairs:
            return {}
        answers = []
        for start in range(0, len(pairs), size):
            part = pairs[start : start + size]
            longest = min(LONGEST_GENERATED, max(len(answer) for _, answer in part), most - len(part[-1][0]))
            answers += generated_ids(model, [asked for asked, _ in part], longest, tokenizer.pad_token_id)
        said = tokenizer.batch_decode(answers, skip_special_tokens=True)
        wanted = tokenizer.batch_decode([answer[:LONGEST_GENERATED] for _, answer in pairs], skip_special_tokens=True)
        scorer = rouge_scorer.RougeScorer(["rougeL"])
        rouge = [scorer.score(target, one)["rougeL"].fmeasure for target, one in zip(wanted, said, strict=True)]
        scores = {"bleu": float(sacrebleu.corpus_bleu(said, [wanted]).score), "rouge_l": 100 * sum(rouge) / len(rouge)}
        return scores | {"generation_seconds": time.perf_counter() - began}

    yield score


def asked_and_answer(sample: Sample) -> tuple[list[int], list[int]]:
    """(the tokens before the last learnt stretch, or nothing where they are only one token, that stretch's tokens)."""
    ids, labels = sample
    end = next((at for at in range(len(ids), 0, -1) if labels[at - 1] != IGNORED), 0)
    first = next((at for at in range(end, 0, -1) if labels[at - 1] == IGNORED), 0)
    return list(ids[:first]) if first > 1 else [], list(ids[first:end])


def generated_ids(model: Any, prompts: list[list[int]], longest: int, pad: int, shortest: int = 0) -> list[list[int]]:
    """Greedy completions of at most `longest` tokens, with the KV cache; prompts are padded on the left.

    Uncompiled: with a cache, code depends on the layer's number and would be compiled for each layer.
    """
    width, device = max(map(len, prompts)), next(model.parameters()).device
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    options = {"max_new_tokens": longest, "min_new_tokens": shortest, "num_beams": 1, "do_sample": False}
    options |= {"use_cache": True, "pad_token_id": pad}
    with torch.compiler.set_stance("force_eager"):
        found: list[list[int]] = model.generate(input_ids=ids, attention_mask=mask, **options)[:, width:].tolist()
    return found
