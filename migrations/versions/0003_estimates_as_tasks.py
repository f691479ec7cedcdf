"""Estimates are tasks of the one queue. Those in the old table are dropped: each is asked again in a second.

Revision ID: 0003
Revises: 0002
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.drop_table("estimates")
    with op.batch_alter_table("tasks") as tasks:
        tasks.add_column(sa.Column("error", sa.Text(), nullable=True))
        tasks.alter_column("job_id", existing_type=sa.String(length=32), nullable=True)


def downgrade() -> None:
    op.execute("DELETE FROM tasks WHERE job_id IS NULL")
    with op.batch_alter_table("tasks") as tasks:
        tasks.alter_column("job_id", existing_type=sa.String(length=32), nullable=False)
        tasks.drop_column("error")
    op.create_table(
        "estimates",
        sa.Column("seq", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("request", sa.JSON(), nullable=False),
        sa.Column("state", sa.String(length=12), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("worker_id", sa.String(length=32), nullable=True),
        sa.Column("lease_until", sa.Float(precision=53), nullable=True),
        sa.Column("result", sa.JSON(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_estimates")),
        sa.UniqueConstraint("id", name=op.f("uq_estimates_id")),
    )
    op.create_index(
        "ix_estimates_open",
        "estimates",
        ["seq"],
        sqlite_where=sa.text("state IN ('queued', 'running')"),
        postgresql_where=sa.text("state IN ('queued', 'running')"),
    )
