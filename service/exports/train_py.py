"""Being written."""
from service.contract.recommendation import Recommendation


def train_py(recommendation: Recommendation) -> str:
    """Being written."""
    return ""
