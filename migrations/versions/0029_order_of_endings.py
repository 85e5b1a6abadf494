"""This revision numbers the lines of batches in the order in which they end, so that their results are read on from any
line. Lines of batches that run now and that have ended are numbered in the order of the input. Batches that have ended need
no numbers: lines without one are read in the order of the input."""

import sqlalchemy as sa
from alembic import op

revision = "0029"
down_revision = "0028"
branch_labels = None
depends_on = None

NUMBER = """
UPDATE batch_line SET ended_no = numbered.place
FROM (
  SELECT ended.batch_id, ended.line_no, row_number() OVER (PARTITION BY ended.batch_id ORDER BY ended.line_no) AS place
  FROM batch JOIN batch_line AS ended ON ended.batch_id = batch.id
  WHERE batch.state IN ('validating', 'in_progress', 'finalizing', 'cancelling') AND ended.state <> 'started'
) AS numbered
WHERE batch_line.batch_id = numbered.batch_id AND batch_line.line_no = numbered.line_no
"""


def upgrade() -> None:
    op.add_column("batch_line", sa.Column("ended_no", sa.BigInteger(), nullable=True))
    op.execute(NUMBER)
    where = sa.text("ended_no IS NOT NULL")
    op.create_index(
        "ix_batch_line_ended",
        "batch_line",
        ["batch_id", "ended_no"],
        unique=True,
        sqlite_where=where,
        postgresql_where=where,
    )
