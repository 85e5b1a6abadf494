"""The table of LoRA adapters that clients can name. Same rules as models.py; here are names and paths, no weights."""

from __future__ import annotations

from sqlalchemy import ForeignKey, Index, text
from sqlalchemy.orm import Mapped, mapped_column

from accounting.tables.models import Base


class Adapter(Base):
    """Deleted ones stay: a worker that still has one is told by its row to let it go."""

    __tablename__ = "adapter"

    id: Mapped[str] = mapped_column(primary_key=True)
    model: Mapped[str]
    name: Mapped[str]
    path: Mapped[str]
    """On the workers' machines."""
    tenant_id: Mapped[str | None] = mapped_column(ForeignKey("tenant.id"))
    """None: for every tenant."""
    created_at: Mapped[int]
    deleted_at: Mapped[int | None]

    __table_args__ = (
        Index(
            "uq_adapter_model_name",
            "model",
            "name",
            unique=True,
            sqlite_where=text("deleted_at IS NULL"),
            postgresql_where=text("deleted_at IS NULL"),
        ),
    )
