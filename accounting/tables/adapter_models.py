"""The table of LoRA adapters that clients can name. The rules of models.py apply. Rows have names and paths, but no
weights."""

from __future__ import annotations

from sqlalchemy import ForeignKey
from sqlalchemy.orm import Mapped, mapped_column

from accounting.tables.models import Base, partial_index


class Adapter(Base):
    """An adapter. Deleted rows stay: by them a worker that still has the adapter learns that it has to drop it."""

    __tablename__ = "adapter"

    id: Mapped[str] = mapped_column(primary_key=True)
    model: Mapped[str]
    name: Mapped[str]
    path: Mapped[str]
    """The path on the workers' machines."""
    tenant_id: Mapped[str | None] = mapped_column(ForeignKey("tenant.id"))
    """The tenant that may use it. None stands for every tenant."""
    created_at: Mapped[int]
    deleted_at: Mapped[int | None]

    __table_args__ = (partial_index("uq_adapter_model_name", "model", "name", where="deleted_at IS NULL", unique=True),)
