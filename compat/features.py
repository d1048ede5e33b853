"""Which CPU flags of ``/proc/cpuinfo`` a program can see. Pure.

A checkpoint from a richer CPU must not be restored on a poorer one: libraries choose their code by what the CPU could
do when they were loaded. Most of what ``flags`` lists matters to the kernel alone (page tables, mitigations, power,
virtual machines), is invented by it, or says only that something is fast; it differs between two kernels on equal
machines. Those are left out by name; a flag that is not known here counts, so that a new instruction set is never
overlooked.
"""

from __future__ import annotations

from typing import Final

#: What no instruction of a program depends on.
UNSEEN: Final = frozenset(
    """
    abmc acc_power acpi amd_clear_bhb amd_fast_cppc amd_hetero_cores amd_ibpb amd_ibrs amd_ibs amd_lbr_pmc_freeze
    amd_lbr_v2 amd_ppin amd_psfd amd_ssbd amd_stibp amd_workload_class aperfmperf apic arat arch_capabilities
    arch_lbr arch_perfmon art auto_ibrs avic bhi_ctrl bmec bpext bts bus_lock_detect cat_l2 cat_l3 cdp_l2 cdp_l3
    clear_bhb_loop cmp_legacy constant_tsc core_capabilities cpb cppc cpuid cpuid_fault cqm cqm_llc cqm_mbm_local
    cqm_mbm_total cqm_occup_llc cr8_legacy dca de debug_swap decodeassists ds_cpl dtes64 dtherm dts entry_ibpb epb
    ept ept_1gb ept_ad ept_x_only erms est extapic extd_apicid flexpriority flush_l1d flushbyasid fsrc fsrm fsrs
    fzrm hfi ht hw_pstate hwp hwp_act_window hwp_epp hwp_notify hwp_pkg_req hybrid_cpu hypervisor ibpb
    ibpb_exit_to_user ibrs ibrs_enhanced ibs ibs_opcnt ida idle_hlt intel_ibrs intel_ppin intel_pt invpcid
    invpcid_single irperf kaiser l1d_flush la57 lbrv lfence_rdtsc lm lwp mba mca mca_recovery mce md_clear
    mfence_rdtsc monitor monitorx msr mtrr mwaitx no_nested_data_bp nodeid_msr nonstop_tsc nonstop_tsc_s3 nopl npt
    nrip_save null_sel_clr_base nx osvw overflow_recov pae pat pausefilter pbe pcid pconfig pdcm pdpe1gb pebs
    perfctr_core perfctr_l2 perfctr_llc perfctr_nb perfmon_v2 pfthreshold pge pln ppin proc_feedback pse pse36 pti
    pts ptsc rapl rdt_a rep_good retpoline retpoline_amd rsb_ctxsw sbpb sdbg sep sev sev_es sev_snp skinit smap smba
    smca sme smep smx spec_ctrl spec_store_bypass_disable splitlock_detect srso srso_alias srso_no ssb_no ssbd stibp
    stibp_always_on succor svm svm_lock syscall tce tdx_guest tdx_host_platform tm tm2 topoext tpr_shadow tsc_adjust
    tsc_deadline_timer tsc_known_freq tsc_reliable tsc_scale tsc_scaling tsx_force_abort umip unret up v_spec_ctrl
    v_vmsave_vmload vgif virt_ssbd vm_page_flush vmcall vmcb_clean vme vmmcall vmx vnmi vpid vte vw_tpr wdt x2apic
    x2avic xen_pv xsaveerptr xsaves xtopology xtpr
    """.split()  # noqa: SIM905
)


def visible(flags: str) -> tuple[str, ...]:
    """The flags of a ``flags`` or ``Features`` line that a program may depend on, sorted."""
    return tuple(sorted(set(flags.split()) - UNSEEN))


def lacking(had: tuple[str, ...], has: tuple[str, ...]) -> tuple[str, ...]:
    """What the CPU of the checkpoint could do and the other one cannot, sorted."""
    return tuple(sorted(set(had) - set(has)))
