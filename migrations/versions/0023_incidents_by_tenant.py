"""This revision adds an index: the incidents of the limiter are read by tenant, and a process that starts does not read
all that ever were."""

from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("ix_limiter_incident_tenant_id_epoch", "limiter_incident", ["tenant_id", "epoch"])
