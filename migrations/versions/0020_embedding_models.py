"""The models that give embeddings, whose usage is told by itself."""

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "embedding_model",
        sa.Column("model", sa.Text(), primary_key=True),
        sa.Column("first_used_at", sa.BigInteger(), nullable=False),
    )
