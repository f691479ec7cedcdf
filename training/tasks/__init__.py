"""One file a task: how rows become samples, which class loads the model, what the loss is, what a right guess is.

Every file has the functions `encode`, `loss_terms`, `model_class`, `set_up`, `summed_loss` and `scored`.
"""
