"""Does content or style tell clients apart? `diagnose` asks, and advises on user verification."""

from harmonium.diagnosis.finding import Finding as Finding
from harmonium.diagnosis.finding import diagnose as diagnose
from harmonium.diagnosis.finding import diagnose_run as diagnose_run
from harmonium.diagnosis.method import Diagnosis as Diagnosis
