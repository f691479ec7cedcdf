"""API keys and owners, submissions that may be repeated, priorities, pauses after a death, and workers that drain.

Revision ID: 0005
Revises: 0004
"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

QUEUED = sa.text("state = 'queued'")
CLAIMABLE = ("need", "kind", "rank")


def upgrade() -> None:
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(length=16), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("owner", sa.String(length=100), nullable=False),
        sa.Column("scopes", sa.JSON(), nullable=False),
        sa.Column("most_open_jobs", sa.Integer(), nullable=True),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.Column("used_at", sa.Float(precision=53), nullable=True),
        sa.Column("revoked_at", sa.Float(precision=53), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_keys")),
    )
    op.create_table(
        "submissions",
        sa.Column("owner", sa.String(length=100), nullable=False),
        sa.Column("key", sa.String(length=200), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("job_id", sa.String(length=32), nullable=False),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_submissions_job_id_jobs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("owner", "key", name=op.f("pk_submissions")),
    )
    op.create_index("ix_submissions_job_id", "submissions", ["job_id"])
    op.add_column("jobs", sa.Column("owner", sa.String(length=100), nullable=True))
    op.create_index("ix_jobs_owner_seq", "jobs", ["owner", "seq"])
    op.create_index("ix_jobs_finished_at", "jobs", ["finished_at"])
    op.add_column("workers", sa.Column("draining", sa.Boolean(), server_default=sa.false(), nullable=False))
    op.add_column("tasks", sa.Column("place", sa.Float(precision=53), nullable=True))
    op.add_column("tasks", sa.Column("owner", sa.String(length=100), nullable=True))
    op.add_column("tasks", sa.Column("not_before", sa.Float(precision=53), nullable=True))
    # Jobs were claimed in the order of their submission, and estimates in the order of theirs.
    op.execute(
        "UPDATE tasks SET place = coalesce((SELECT created_at FROM jobs WHERE jobs.id = tasks.job_id), created_at)"
    )
    op.drop_index("ix_tasks_claimable", table_name="tasks")
    with op.batch_alter_table("tasks") as batch:
        batch.alter_column("place", existing_type=sa.Float(precision=53), nullable=False)
        batch.drop_column("job_seq")
    _index("place")
    with op.batch_alter_table("workers") as batch:
        batch.alter_column("draining", existing_type=sa.Boolean(), server_default=None, nullable=False)


def downgrade() -> None:
    op.drop_index("ix_tasks_claimable", table_name="tasks")
    op.add_column("tasks", sa.Column("job_seq", sa.Integer(), nullable=True))
    op.execute("UPDATE tasks SET job_seq = coalesce((SELECT seq FROM jobs WHERE jobs.id = tasks.job_id), 0)")
    with op.batch_alter_table("tasks") as batch:
        batch.alter_column("job_seq", existing_type=sa.Integer(), nullable=False)
        batch.drop_column("not_before")
        batch.drop_column("owner")
        batch.drop_column("place")
    _index("job_seq")
    op.drop_column("workers", "draining")
    op.drop_index("ix_jobs_finished_at", table_name="jobs")
    op.drop_index("ix_jobs_owner_seq", table_name="jobs")
    op.drop_column("jobs", "owner")
    op.drop_index("ix_submissions_job_id", table_name="submissions")
    op.drop_table("submissions")
    op.drop_table("api_keys")


def _index(place: str) -> None:
    columns = [*CLAIMABLE, place, "seq"]
    op.create_index("ix_tasks_claimable", "tasks", columns, sqlite_where=QUEUED, postgresql_where=QUEUED)
