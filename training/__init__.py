"""The code that trains: data, tasks, model, adapter, optimizer, batches, step, evaluation and levers.

Every function that depends on how to train takes a frozen Recipe (training/recipe.py). A trial imports these
functions; the export `train.py` prints the same functions, specialised for its recipe. The package needs torch,
transformers, peft and the standard library, and imports nothing else of this repository.
"""
