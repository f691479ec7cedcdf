"""What tasks need of a worker becomes rows of its own, so that a claim does not look at tasks that it cannot serve.

Revision ID: 0004
Revises: 0003
"""

import hashlib
import json

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

QUEUED = sa.text("state = 'queued'")
BEFORE = ("need_device", "need_name", "need_bytes", "fingerprint")
AFTER = ("device", "name", "bytes", "fingerprint")


def upgrade() -> None:
    op.create_table(
        "needs",
        sa.Column("key", sa.String(length=16), nullable=False),
        sa.Column("device", sa.String(length=20), nullable=True),
        sa.Column("name", sa.String(length=200), nullable=True),
        sa.Column("bytes", sa.Float(precision=53), nullable=True),
        sa.Column("fingerprint", sa.String(length=16), nullable=True),
        sa.PrimaryKeyConstraint("key", name=op.f("pk_needs")),
    )
    op.add_column("tasks", sa.Column("need", sa.String(length=16), nullable=True))
    tasks = sa.table("tasks", *(sa.column(name) for name in ("need", *BEFORE)))
    needs = sa.table("needs", *(sa.column(name) for name in ("key", *AFTER)))
    connection = op.get_bind()
    for values in connection.execute(sa.select(*(tasks.c[name] for name in BEFORE)).distinct()).all():
        key = hashlib.sha256(json.dumps(list(values)).encode()).hexdigest()[:16]
        connection.execute(sa.insert(needs).values(key=key, **dict(zip(AFTER, values, strict=True))))
        same = [tasks.c[name].is_not_distinct_from(value) for name, value in zip(BEFORE, values, strict=True)]
        connection.execute(sa.update(tasks).where(*same).values(need=key))
    op.drop_index("ix_tasks_claimable", table_name="tasks")
    with op.batch_alter_table("tasks") as batch:
        batch.alter_column("need", existing_type=sa.String(length=16), nullable=False)
        for name in BEFORE:
            batch.drop_column(name)
    op.create_index(
        "ix_tasks_claimable",
        "tasks",
        ["need", "kind", "rank", "job_seq", "seq"],
        sqlite_where=QUEUED,
        postgresql_where=QUEUED,
    )


def downgrade() -> None:
    op.drop_index("ix_tasks_claimable", table_name="tasks")
    for name, kind in zip(BEFORE, (sa.String(20), sa.String(200), sa.Float(53), sa.String(16)), strict=True):
        op.add_column("tasks", sa.Column(name, kind, nullable=True))
    for before, after in zip(BEFORE, AFTER, strict=True):
        op.execute(f"UPDATE tasks SET {before} = (SELECT {after} FROM needs WHERE needs.key = tasks.need)")  # noqa: S608
    with op.batch_alter_table("tasks") as batch:
        batch.drop_column("need")
    op.create_index(
        "ix_tasks_claimable", "tasks", ["rank", "job_seq", "seq"], sqlite_where=QUEUED, postgresql_where=QUEUED
    )
    op.drop_table("needs")
