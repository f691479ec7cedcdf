"""The control plane: FastAPI, SQLAlchemy, pydantic. It never imports torch or the worker."""

__version__ = "0.1.0"
