"""One page of HTML about any number of runs: see `write_report`."""

from gradwire.experiment.report.page.page import report_html as report_html
from gradwire.experiment.report.page.page import write_report as write_report
