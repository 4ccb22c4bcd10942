//! NRI events: their names, and how they travel.

use nri_lease_proto::nri::nri::Event;

/// Events whose RPC is new in 0.12, with StateChange to fall back on.
pub(crate) fn falls_back_to_state_change(event: Event) -> bool {
    !matches!(
        event,
        Event::UPDATE_POD_SANDBOX
            | Event::CREATE_CONTAINER
            | Event::UPDATE_CONTAINER
            | Event::STOP_CONTAINER
            | Event::VALIDATE_CONTAINER_ADJUSTMENT
    )
}

/// The name of the event's RPC, also where it is sent as StateChange.
pub(crate) fn rpc_name(event: Event) -> &'static str {
    match event {
        Event::UNKNOWN => "Unknown",
        Event::RUN_POD_SANDBOX => "RunPodSandbox",
        Event::STOP_POD_SANDBOX => "StopPodSandbox",
        Event::REMOVE_POD_SANDBOX => "RemovePodSandbox",
        Event::CREATE_CONTAINER => "CreateContainer",
        Event::POST_CREATE_CONTAINER => "PostCreateContainer",
        Event::START_CONTAINER => "StartContainer",
        Event::POST_START_CONTAINER => "PostStartContainer",
        Event::UPDATE_CONTAINER => "UpdateContainer",
        Event::POST_UPDATE_CONTAINER => "PostUpdateContainer",
        Event::STOP_CONTAINER => "StopContainer",
        Event::REMOVE_CONTAINER => "RemoveContainer",
        Event::UPDATE_POD_SANDBOX => "UpdatePodSandbox",
        Event::POST_UPDATE_POD_SANDBOX => "PostUpdatePodSandbox",
        Event::VALIDATE_CONTAINER_ADJUSTMENT => "ValidateContainerAdjustment",
    }
}
