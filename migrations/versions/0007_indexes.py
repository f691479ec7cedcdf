"""Indexes for webhooks' turns, and for lists of jobs by the time of their submission.

Revision ID: 0007
Revises: 0006
"""

from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.drop_index("ix_deliveries_webhook_id", table_name="deliveries")
    op.create_index("ix_deliveries_webhook_id_tried_at", "deliveries", ["webhook_id", "tried_at"])
    op.create_index("ix_jobs_created_at", "jobs", ["created_at"])


def downgrade() -> None:
    op.drop_index("ix_jobs_created_at", table_name="jobs")
    op.drop_index("ix_deliveries_webhook_id_tried_at", table_name="deliveries")
    op.create_index("ix_deliveries_webhook_id", "deliveries", ["webhook_id"])
