"""The report: one self-contained HTML page from records alone."""

from proxprop.lab.report.write import write_report

__all__ = ["write_report"]
